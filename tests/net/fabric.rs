//! More than two hosts: each talks to two others, over rails that fail for one of them, for several or for all.
//!
//! The long form, alone: `TOWLINE_FAULTS=200 cargo test --release --test net fabric:: -- --ignored`.

use std::time::Instant;

use crate::support::fabric::{Fabric, Fault};
use crate::support::netns::{Namespace, all_reduce_until, available};
use crate::support::{number, watchdog};

/// Run by `.ci/run`, and by `-- --ignored long::`.
mod long {
    use super::*;

    #[test]
    #[ignore = "long: .ci/run runs it"]
    fn rails_that_fail_among_four_hosts_lose_nothing_and_hang_nothing() {
        if !available() {
            return;
        }
        let (faults, seed) = (number("TOWLINE_FAULTS").unwrap_or(8) as usize, crate::support::faults::seed());
        let _watchdog = watchdog(90 + 12 * faults as u64);
        for (round, family) in ["AF_INET", "AF_INET6"].into_iter().enumerate() {
            let fabric = Fabric::new(4, 2 + round);
            let start = Instant::now();
            let (made, runs) = std::thread::scope(|scope| {
                let failing = scope.spawn(|| fabric.fail_at_random(seed + round as u64, faults / 2));
                let hosts: Vec<&Namespace> = fabric.hosts.iter().collect();
                let variables = [("TOWLINE_STREAMS", "3"), ("NCCL_SOCKET_FAMILY", family)];
                let runs = all_reduce_until(&hosts, "-e 2M -n 25 --timeout 60", &variables, || failing.is_finished());
                (failing.join().expect("the faults end"), runs)
            });
            eprintln!(
                "4 hosts, {} rails, {family}: {} faults ({:?}: {made:?}), {runs} runs of all-reduce, 0 wrong, 0 hangs, {:.0} s",
                fabric.rails(),
                made.iter().sum::<usize>(),
                Fault::ALL,
                start.elapsed().as_secs_f64(),
            );
        }
    }
}

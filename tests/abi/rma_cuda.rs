//! One-sided operations on a GPU's memory, with `tests/cuda_stand_in.c` for CUDA's driver: its memory faults when the
//! host touches it, and its copies happen late. NCCL and real GPUs are not part of these tests:
//! `tests/gpu/one_sided.py`.

use std::time::{Duration, Instant};

use crate::support::flagcx::Object;
use crate::support::one_sided::{ON, PATIENCE, Rank, at, connected, holds, moves_all_sizes, signals_follow_their_puts};
use crate::support::rma::PutSignal;
use crate::support::window::{
    Window, a_stream_waits, copies_are_late, copies_fail, copies_waiting, stand_in, the_context_ends,
};
use crate::support::{child, eventually, watchdog};
use towline::host::Code;
use towline::host::log::Capture;

/// The registration may hold signals.
const FORCE_SO: u64 = 1;
/// NCCL's promise that nobody else writes the signals.
const NEVER_RESET: u64 = 2;

fn alone(name: &str, body: impl FnOnce()) {
    let folder = stand_in().to_str().expect("text");
    child::alone(name, &[ON, ("LD_LIBRARY_PATH", folder), ("TOWLINE_STREAMS", "3")], body);
}

#[test]
fn puts_and_gets_of_all_sizes_arrive_in_a_gpus_memory() {
    alone("rma_cuda::puts_and_gets_of_all_sizes_arrive_in_a_gpus_memory", || {
        let _watchdog = watchdog(200);
        for (round, late) in [0, 3].into_iter().enumerate() {
            copies_are_late(late);
            moves_all_sizes(14 + round as u32, 2 + round, |_, size| Window::gpu(size));
            // Some in the host's.
            moves_all_sizes(
                16,
                3,
                |which, size| if which % 2 == round { Window::gpu(size) } else { Window::host(size) },
            );
        }
        assert_eq!(copies_waiting(), 0);
    });
}

/// In all places that windows, signals and sources can have, and with both ways to add.
#[test]
fn a_visible_signal_means_that_all_earlier_copies_have_happened() {
    alone("rma_cuda::a_visible_signal_means_that_all_earlier_copies_have_happened", || {
        let _watchdog = watchdog(300);
        for (round, flags) in (1..8_usize).flat_map(|places| [(places, FORCE_SO), (places, FORCE_SO | NEVER_RESET)]) {
            copies_are_late([0, 1, 7][round % 3]);
            let place =
                |which: usize, size| if round >> which & 1 == 1 { Window::gpu(size) } else { Window::host(size) };
            signals_follow_their_puts((2 + round % 2, 60), place, flags, |_, _| ());
        }
    });
}

/// A signal in the host's memory, behind copies that have not happened.
#[test]
fn a_signal_waits_for_copies_into_other_memory() {
    alone("rma_cuda::a_signal_waits_for_copies_into_other_memory", || {
        let _watchdog = watchdog(60);
        let ranks = connected(16, 2);
        let (source, window, signals) = (Window::host(4096), Window::gpu(4096), Window::host(8));
        source.fill(&[7; 4096]);
        let register = |rank: &Rank| [&source, &window, &signals].map(|it| rank.register(it));
        let [from, to, number] = register(&ranks[0]);
        register(&ranks[1]);
        // Never, as far as this test goes.
        copies_are_late(i32::MAX);
        for target in 0..2 {
            let signal = PutSignal { at: at(number, 0), value: None };
            ranks[0].put((at(from, 0), 4096, at(to, 0)), target, Some(signal));
        }
        let start = Instant::now();
        while copies_waiting() < 2 {
            assert!(start.elapsed() < Duration::from_secs(10), "both copies begin");
            towline::host::give_way(start);
        }
        std::thread::sleep(Duration::from_millis(50));
        assert!(signals.is_filled_with(0) && window.is_filled_with(0));
        // The process ends here: these copies never do.
        std::mem::forget((ranks, source, window, signals));
    });
}

/// So NCCL flushes when a graph waits for a signal.
#[test]
fn a_put_onto_itself_ends_when_all_that_has_come_is_in_place() {
    alone("rma_cuda::a_put_onto_itself_ends_when_all_that_has_come_is_in_place", || {
        let _watchdog = watchdog(60);
        let ranks = connected(16, 2);
        let (source, window) = (Window::host(4096), Window::gpu(4096));
        source.fill(&[7; 4096]);
        let [(from, to), _] = [0, 1].map(|rank: usize| (ranks[rank].register(&source), ranks[rank].register(&window)));
        copies_are_late(2000);
        let put = ranks[1].put((at(from, 0), 4096, at(to, 0)), 0, None);
        eventually("the copy begins", PATIENCE, || (copies_waiting() > 0).then_some(()));
        ranks[0].wait(ranks[0].put((at(to, 0), 8, at(to, 0)), 0, None)).expect("the flush ends");
        assert_eq!(copies_waiting(), 0);
        assert!(holds(&window, 0, &[7; 4096]));
        ranks[1].wait(put).expect("the put ends");
        ranks.into_iter().for_each(Rank::close);
    });
}

/// What GPUs reset must be read anew.
#[test]
fn a_signal_that_the_gpu_resets_counts_from_there() {
    alone("rma_cuda::a_signal_that_the_gpu_resets_counts_from_there", || {
        let _watchdog = watchdog(60);
        let ranks = connected(16, 2);
        let signals = Window::gpu(16);
        let [number, _] = [0, 1].map(|rank: usize| ranks[rank].register(&signals));
        for (round, late) in [0, 5].into_iter().enumerate() {
            copies_are_late(late);
            for value in [5, 6] {
                let signal = PutSignal { at: at(number, 8), value: Some(value) };
                let nothing = (crate::support::one_sided::NOWHERE, 0, crate::support::one_sided::NOWHERE);
                ranks[0].wait(ranks[0].put(nothing, 1 - round, Some(signal))).expect("a signal");
            }
            assert_eq!(crate::support::one_sided::signal_of(&signals, 1), 11);
            signals.fill(&[0; 16]);
        }
        ranks.into_iter().for_each(Rank::close);
    });
}

/// With `CUDA_DEVICE_MAX_CONNECTIONS=1`, or more streams that wait than the GPU has queues.
#[test]
fn a_signal_comes_while_all_queues_of_the_application_wait_for_it() {
    alone("rma_cuda::a_signal_comes_while_all_queues_of_the_application_wait_for_it", || {
        let _watchdog = watchdog(60);
        for flags in [0, NEVER_RESET] {
            let ranks = connected(16, 2);
            let (window, signals) = (Window::gpu(4096), Window::gpu(8));
            let [what, _] = [0, 1].map(|rank: usize| {
                let (mr, number) = (ranks[rank].register(&window), ranks[rank].register_as(&signals, flags));
                ((at(mr, 0), 64, at(mr, 64)), PutSignal { at: at(number, 0), value: None })
            });
            a_stream_waits(true);
            ranks[0].wait(ranks[0].put(what.0, 1, Some(what.1))).expect("the put ends");
            assert_eq!(crate::support::one_sided::signal_of(&signals, 0), 1);
            a_stream_waits(false);
            ranks.into_iter().for_each(Rank::close);
        }
    });
}

#[test]
fn registrations_end_while_copies_are_late() {
    alone("rma_cuda::registrations_end_while_copies_are_late", || {
        let _watchdog = watchdog(100);
        let size = 4 << 20;
        for (round, late) in [0, 2, 5, 20].into_iter().enumerate() {
            copies_are_late(late);
            let ranks = connected(16, 2);
            let (source, window) = (Window::gpu(size), Window::gpu(size));
            let mrs = [ranks[0].register(&source), ranks[1].register(&window)];
            let what = (at(mrs[0], 0), size, at(mrs[0], 0));
            let requests: Vec<Object> = (0..4).map(|_| ranks[0].put(what, 1, None)).collect();
            std::thread::sleep(Duration::from_millis(round as u64 * 3));
            ranks[1].rma.dereg_mr(ranks[1].group, mrs[1]).expect("deregMrSym");
            // A copy that comes now is the process's death.
            drop(window);
            if round % 2 == 0 {
                ranks[0].rma.dereg_mr(ranks[0].group, mrs[0]).expect("deregMrSym");
                drop(source);
            }
            let ends: Vec<_> = requests.into_iter().map(|request| ranks[0].wait(request)).collect();
            assert!(ends.iter().all(Result::is_ok), "{ends:?}");
            ranks.into_iter().for_each(Rank::close);
        }
    });
}

#[test]
fn groups_close_while_copies_are_under_way() {
    alone("rma_cuda::groups_close_while_copies_are_under_way", || {
        let _watchdog = watchdog(100);
        let size = 8 << 20;
        for round in 0..6 {
            copies_are_late(2 * round);
            let mut ranks = connected(16, 3);
            let window = Window::gpu(size);
            let mrs: Vec<Object> = ranks.iter().map(|rank| rank.register(&window)).collect();
            for to in 0..3 {
                ranks[0].put((at(mrs[0], 0), size / 2, at(mrs[0], size / 2)), to, None);
                ranks[0]
                    .rma
                    .get(ranks[0].context, (at(mrs[0], 0), size / 2, at(mrs[0], size / 2)), to as u32)
                    .expect("iget");
            }
            std::thread::sleep(Duration::from_millis(round as u64));
            ranks.rotate_left(round as usize % 3);
            let start = Instant::now();
            ranks.into_iter().for_each(Rank::close);
            // Not a promise: each late copy is asked after again and again, on a machine that runs other tests.
            assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
            assert_eq!(copies_waiting(), 0);
            // A copy that comes now is the process's death.
            drop(window);
        }
    });
}

/// `cudaDeviceReset` ends the context under a communicator; the next one finds the new context.
#[test]
fn a_context_that_is_gone_is_an_error_and_the_next_one_is_found() {
    alone("rma_cuda::a_context_that_is_gone_is_an_error_and_the_next_one_is_found", || {
        let _watchdog = watchdog(60);
        for is_reset in [true, false] {
            let ranks = connected(16, 2);
            let window = Window::gpu(4096);
            let [mr, _] = [0, 1].map(|rank: usize| ranks[rank].register(&window));
            let put = || ranks[0].wait(ranks[0].put((at(mr, 0), 64, at(mr, 64)), 1, None));
            assert_eq!(put(), Ok(()));
            if is_reset {
                the_context_ends();
                assert!(put().is_err() && put().is_err());
            }
            let start = Instant::now();
            ranks.into_iter().for_each(Rank::close);
            assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        }
    });
}

const SIZE: usize = 4 << 20;

/// Which copy fails: one that brings bytes from a GPU, one that brings them there, one on the own rank.
#[test]
fn a_failed_copy_is_an_error_of_its_request_and_one_line() {
    alone("rma_cuda::a_failed_copy_is_an_error_of_its_request_and_one_line", || {
        let _watchdog = watchdog(100);
        // The last of few bytes has nothing under way when its copy fails.
        let cases = [(true, false, 1, SIZE), (false, true, 1, SIZE), (true, true, 0, SIZE), (false, true, 1, 8)];
        for (from_gpu, to_gpu, target, size) in cases {
            copies_are_late(2);
            let ranks = connected(16, 2);
            let make = |is_gpu: bool| if is_gpu { Window::gpu(SIZE) } else { Window::host(SIZE) };
            let (source, window) = (make(from_gpu), make(to_gpu));
            let [(from, to), _] =
                [0, 1].map(|rank: usize| (ranks[rank].register(&source), ranks[rank].register(&window)));
            let what = (at(from, 0), size, at(to, 0));
            ranks[0].wait(ranks[0].put(what, target, None)).expect("it works");
            let log = Capture::start();
            copies_fail(1);
            let end = ranks[0].wait(ranks[0].put(what, target, None));
            assert!(matches!(end, Err(Code::SystemError | Code::RemoteError)), "{end:?}");
            let again = ranks[0].wait(ranks[0].put(what, target, None));
            assert!(again.is_err(), "{again:?}");
            let of_cuda = || log.records().iter().filter(|it| it.text.contains("CUDA error 700")).count();
            // The rank that copies may report it after its peer has seen the connection close.
            let patience = Instant::now();
            while of_cuda() == 0 && patience.elapsed() < Duration::from_secs(10) {
                std::thread::sleep(Duration::from_millis(10));
            }
            assert_eq!(of_cuda(), 1, "{:?}", log.records());
            let start = Instant::now();
            ranks.into_iter().for_each(Rank::close);
            assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
            copies_fail(0);
        }
    });
}

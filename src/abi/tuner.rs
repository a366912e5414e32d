//! NCCL's tuner interface, v3 to v6: the adapter between its C tables and [`crate::plugin::tuning`].
//!
//! NCCL 2.21 and later look for a tuner in the network plugin's library when `NCCL_TUNER_PLUGIN` names none, so these
//! tables load for everyone who uses Towline. They change nothing for a communicator whose traffic is not Towline's.
//!
//! The context is the two numbers that matter, the ranks and the nodes, dressed as a pointer: nothing is allocated and
//! nothing can be stale.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::slice;

use super::ffi::*;
use super::guard::guard;
use super::pointer::Out;
use super::table::{NAME, Table};
use crate::os::error::{Error, Result};
use crate::plugin::tuning::{self, Advice, Collective, Question, Shape, Tree};

/// Exports `ncclTunerPlugin_vN`.
macro_rules! export_tuner {
    ($(#[$doc:meta])* $symbol:ident: $type:ident = { $($field:ident: $function:expr),* $(,)? }) => {
        $(#[$doc])*
        // SAFETY: the symbol is NCCL's name for exactly this type, and nothing else in the process defines it in this
        // library's scope.
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals, reason = "NCCL's name")]
        pub static $symbol: Table<$type> = Table($type { name: NAME.as_ptr(), $($field: $function),* });
    };
}

export_tuner! {
    /// The table that NCCL 2.22 and 2.23 load.
    ncclTunerPlugin_v3: ncclTuner_v3_t = {
        init: Some(init_v3), getCollInfo: Some(get_coll_info_v3), destroy: Some(end),
    }
}
export_tuner! {
    /// The table that NCCL 2.24 to 2.27 load.
    ncclTunerPlugin_v4: ncclTuner_v4_t = {
        init: Some(init_v3), getCollInfo: Some(get_coll_info_v4), destroy: Some(end),
    }
}
export_tuner! {
    /// The table that NCCL 2.28 and 2.29 load.
    ncclTunerPlugin_v5: ncclTuner_v5_t = {
        init: Some(init_v5), getCollInfo: Some(get_coll_info_v4), finalize: Some(end),
    }
}
export_tuner! {
    /// The table that NCCL 2.30 and later load.
    ncclTunerPlugin_v6: ncclTuner_v6_t = {
        init: Some(init_v5), getCollInfo: Some(get_coll_info_v4), finalize: Some(end), getChunkSize: None,
    }
}

/// A communicator's shape as a context. Never null: NCCL does not mind, but a null pointer says nothing in a debugger.
fn dress(shape: Shape) -> *mut c_void {
    ptr::without_provenance_mut(shape.ranks.min(u32::MAX as usize) << 32 | shape.nodes.min(0x7FFF_FFFF) << 1 | 1)
}

fn undress(context: *mut c_void) -> Shape {
    let value = context.addr();
    Shape { ranks: value >> 32, nodes: (value & 0xFFFF_FFFF) >> 1 }
}

unsafe extern "C" fn init_v3(
    ranks: usize,
    nodes: usize,
    _logger: ncclDebugLogger_t,
    context: *mut *mut c_void,
) -> ncclResult_t {
    guard::<12>("tuner init", || {
        // SAFETY: NCCL's promise: a place for the context.
        let mut context = unsafe { Out::new(context, "context") }?;
        context.set(dress(Shape { ranks, nodes }));
        Ok(())
    })
}

unsafe extern "C" fn init_v5(
    context: *mut *mut c_void,
    _comm: u64,
    ranks: usize,
    nodes: usize,
    logger: ncclDebugLogger_t,
    _nvlink_domains: *mut c_void,
    _constants: *mut c_void,
) -> ncclResult_t {
    // SAFETY: NCCL's promise, passed on.
    unsafe { init_v3(ranks, nodes, logger, context) }
}

unsafe extern "C" fn get_coll_info_v3(
    context: *mut c_void,
    collective: c_int,
    bytes: usize,
    operations: c_int,
    table: *mut *mut f32,
    algorithms: c_int,
    protocols: c_int,
    channels: *mut c_int,
) -> ncclResult_t {
    // SAFETY: NCCL's promise, passed on.
    unsafe { get_coll_info_v4(context, collective, bytes, operations, table, algorithms, protocols, 0, channels) }
}

unsafe extern "C" fn get_coll_info_v4(
    context: *mut c_void,
    collective: c_int,
    bytes: usize,
    _operations: c_int,
    table: *mut *mut f32,
    algorithms: c_int,
    protocols: c_int,
    _registered: c_int,
    channels: *mut c_int,
) -> ncclResult_t {
    guard::<12>("getCollInfo", || {
        let Some(collective) = collective_of(collective) else { return Ok(()) };
        // SAFETY: NCCL's promise: an array of that many rows of that many times, whatever its type says.
        let mut costs = unsafe { Costs::new(table.cast(), algorithms, protocols) }?;
        let question = Question { shape: undress(context), collective, bytes };
        let Some(advice) = tuning::advise(&question) else { return Ok(()) };
        costs.apply(&advice);
        if let Some(wanted) = advice.channels {
            // SAFETY: NCCL's promise: a place for the number.
            unsafe { Out::new(channels, "nChannels") }?.set(wanted);
        }
        Ok(())
    })
}

unsafe extern "C" fn end(_context: *mut c_void) -> ncclResult_t {
    ncclSuccess
}

fn collective_of(number: c_int) -> Option<Collective> {
    #[allow(non_upper_case_globals, reason = "NCCL's names")]
    Some(match u32::try_from(number).ok()? {
        ncclFuncBroadcast => Collective::Broadcast,
        ncclFuncReduce => Collective::Reduce,
        ncclFuncAllGather => Collective::AllGather,
        ncclFuncReduceScatter => Collective::ReduceScatter,
        ncclFuncAllReduce => Collective::AllReduce,
        _ => return None,
    })
}

/// More than any estimate: an hour.
const LAST_CHOICE_US: f32 = 3.6e9;

/// NCCL's estimate, in microseconds, for each algorithm and protocol.
struct Costs<'a> {
    times: &'a mut [f32],
    protocols: usize,
}

impl Costs<'_> {
    /// # Safety
    /// `times` is null or valid for reading and writing `algorithms` times `protocols` values until the call ends.
    unsafe fn new(times: *mut f32, algorithms: c_int, protocols: c_int) -> Result<Self> {
        let sizes = (usize::try_from(algorithms), usize::try_from(protocols));
        let (Ok(algorithms @ 1..=64), Ok(protocols @ 1..=64)) = sizes else {
            return Err(Error::argument(format!("a cost table of {algorithms} by {protocols}")));
        };
        if times.is_null() {
            return Err(Error::argument("the cost table is a null pointer"));
        }
        // SAFETY: this function's contract.
        Ok(Self { times: unsafe { slice::from_raw_parts_mut(times, algorithms * protocols) }, protocols })
    }

    /// Changes NCCL's estimates so that it does what is advised.
    fn apply(&mut self, advice: &Advice) {
        self.add(NCCL_PROTO_LL as usize, advice.ll_costs_more_us);
        self.add(NCCL_PROTO_LL128 as usize, advice.ll128_costs_more_us);
        match advice.tree {
            Some(Tree::LL) => self.choose(NCCL_ALGO_TREE as usize, NCCL_PROTO_LL as usize),
            Some(Tree::Simple) => self.choose(NCCL_ALGO_TREE as usize, NCCL_PROTO_SIMPLE as usize),
            None => {}
        }
        if advice.avoids_ll_and_trees {
            self.add(NCCL_PROTO_LL as usize, LAST_CHOICE_US);
            self.discourage(NCCL_ALGO_TREE as usize);
        }
        if advice.avoids_pat {
            self.discourage(NCCL_ALGO_PAT as usize);
        }
    }

    /// Makes a combination the cheapest, unless NCCL rules it out.
    fn choose(&mut self, algorithm: usize, protocol: usize) {
        let at = algorithm * self.protocols + protocol;
        if protocol < self.protocols
            && let Some(time) = self.times.get_mut(at)
            && *time >= 0.0
        {
            *time = 0.0;
        }
    }

    /// Makes an algorithm the last choice with every protocol; releases before 2.23 do not have all of them.
    fn discourage(&mut self, algorithm: usize) {
        let row = algorithm * self.protocols..(algorithm + 1) * self.protocols;
        for time in self.times.get_mut(row).into_iter().flatten().filter(|time| **time >= 0.0) {
            *time += LAST_CHOICE_US;
        }
    }

    /// Adds to the time of a protocol, for rings and trees, where NCCL does not rule it out.
    fn add(&mut self, protocol: usize, microseconds: f32) {
        for algorithm in [NCCL_ALGO_TREE as usize, NCCL_ALGO_RING as usize] {
            let at = algorithm * self.protocols + protocol;
            if protocol < self.protocols
                && let Some(time) = self.times.get_mut(at)
                && *time >= 0.0
            {
                *time += microseconds;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_carries_the_shape_and_is_never_null() {
        for shape in [Shape { ranks: 1, nodes: 1 }, Shape { ranks: 16_384, nodes: 2_048 }] {
            assert!(!dress(shape).is_null());
            assert_eq!(undress(dress(shape)), shape);
        }
    }

    /// NCCL's estimates for an all-reduce of two nodes with one GPU each (NCCL 2.28, src/graph/tuning.cc), in microseconds, by
    /// algorithm and protocol; LL128 is ruled out, as where the card is not close to the GPU. `speed`: of the network, in
    /// bytes per microsecond.
    fn estimates(bytes: f32, speed: f32) -> [[f32; 3]; 2] {
        let doubled = ((bytes / 64.0).log2() as usize).min(13);
        let of_tree_ll = [1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4][doubled];
        let of_tree_simple = [0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5][doubled];
        let tree_speed = speed * 0.92;
        let tree_ll = 6.8 + 2.0 * 5.0 + bytes / (tree_speed / 3.8 * of_tree_ll);
        let tree_simple = 8.4 + 2.0 * 14.0 + bytes / (tree_speed * of_tree_simple);
        let ring_ll = 6.6 + 2.0 * 5.0 + bytes / (speed / 2.0);
        let ring_simple = (8.4 + 2.0 * 14.0) * 1.4 + bytes / speed;
        [[tree_ll, -1.0, tree_simple], [ring_ll, -1.0, ring_simple]]
    }

    #[test]
    fn how_long_ll_is_best_depends_on_the_speed_of_the_network() {
        let chosen = |kib: usize, speed: f32| {
            let mut times = estimates((kib << 10) as f32, speed);
            // SAFETY: the array is that large.
            let mut costs = unsafe { Costs::new(times.as_mut_ptr().cast(), 2, 3) }.unwrap();
            let shape = Shape { ranks: 2, nodes: 2 };
            let question = Question { shape, collective: Collective::AllReduce, bytes: kib << 10 };
            costs.apply(&tuning::advice(&question).unwrap());
            let names = [["tree LL", "", "tree"], ["ring LL", "", "ring"]];
            let all = times.iter().zip(names).flat_map(|(times, names)| times.iter().copied().zip(names));
            all.filter(|(time, _)| *time >= 0.0).min_by(|(a, _), (b, _)| a.total_cmp(b)).unwrap().1
        };
        let at = |speed: f32| [4, 8, 16, 32, 64, 128, 160, 256, 1024].map(|kib| chosen(kib, speed));
        let [small, ll, simple, tree] = ["tree LL", "ring LL", "ring", "tree"];
        // 77 Gbit/s, as is reported where the kernel does not know better; 25; 10.
        assert_eq!(at(9625.0), [small, ll, ll, ll, ll, ll, simple, tree, simple]);
        assert_eq!(at(3125.0), [small, ll, ll, ll, ll, simple, simple, tree, simple]);
        assert_eq!(at(1250.0), [small, ll, ll, ll, simple, simple, simple, tree, simple]);
    }

    #[test]
    fn what_nccl_rules_out_stays_ruled_out() {
        let mut times = [[10.0_f32, -1.0, 30.0], [40.0, 50.0, 60.0], [70.0, 80.0, 90.0]];
        // SAFETY: the array is that large.
        let mut costs = unsafe { Costs::new(times.as_mut_ptr().cast(), 3, 3) }.unwrap();
        costs.add(0, 1.0);
        costs.add(1, 2.0);
        assert_eq!(times, [[11.0, -1.0, 30.0], [41.0, 52.0, 60.0], [70.0, 80.0, 90.0]]);
        // SAFETY: the array is that large.
        let mut costs = unsafe { Costs::new(times.as_mut_ptr().cast(), 3, 3) }.unwrap();
        costs.choose(1, 1);
        // Ruled out, and not in the table.
        [(0, 1), (0, 3), (7, 0)].into_iter().for_each(|(algorithm, protocol)| costs.choose(algorithm, protocol));
        assert_eq!(times, [[11.0, -1.0, 30.0], [41.0, 0.0, 60.0], [70.0, 80.0, 90.0]]);
        assert_eq!(times[1], [41.0, 0.0, 60.0]);
        assert!(times[0][1] < 0.0, "ruled out");
        // SAFETY: the array is that large.
        let mut costs = unsafe { Costs::new(times.as_mut_ptr().cast(), 3, 3) }.unwrap();
        costs.discourage(0);
        costs.discourage(6);
        assert!(times[0][0] > 1e9 && times[0][1] < 0.0 && times[1][0] < 1e3);
        // SAFETY: null is refused before anything is read.
        assert!(unsafe { Costs::new(ptr::null_mut(), 3, 3) }.is_err());
        // SAFETY: as above.
        assert!(unsafe { Costs::new(times.as_mut_ptr().cast(), -1, 3) }.is_err());
    }
}

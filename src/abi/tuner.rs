//! NCCL's tuner interface, v2 to v6: the adapter between its C tables and [`crate::plugin::tuning`].
//!
//! NCCL 2.20 and later look for a tuner in the network plugin's library when `NCCL_TUNER_PLUGIN` names none, so these
//! tables load in every process that uses Towline. NCCL has one tuner for all communicators of the process, also for
//! those of one node or over another network. `init` settles whether a communicator gets advice, because later the
//! process may have other communicators than the processes of the other ranks. From then on an answer depends on the
//! query alone.
//!
//! The context is that, with the number of ranks and nodes, dressed as a pointer: nothing is allocated and nothing can
//! be stale.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::slice;

use super::guard::guard;
use super::pointer::Out;
use super::table::{NAME, Table};
use crate::nccl::ffi::*;
use crate::os::error::{Error, Result};
use crate::plugin::facade;
use crate::plugin::tuning::{self, Algorithm, Collective, MANY, Protocol, Question, Scope, Shape, Way};

/// Exports `ncclTunerPlugin_vN`.
macro_rules! export_tuner {
    ($(#[$doc:meta])* $symbol:ident: $type:ident = { $($field:ident: $function:expr),* $(,)? }) => {
        $(#[$doc])*
        // SAFETY: the symbol is NCCL's name for exactly this type, and nothing else in the process defines it in this
        // library's scope.
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals, reason = "NCCL's name")]
        pub(crate) static $symbol: Table<$type> = Table($type { name: NAME.as_ptr(), $($field: $function),* });
    };
}

export_tuner! {
    /// The table that NCCL 2.20 and 2.21 load.
    ncclTunerPlugin_v2: ncclTuner_v2_t = {
        init: Some(init_v3), getCollInfo: Some(get_coll_info_v2), destroy: Some(end),
    }
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

/// A communicator as a context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Asker {
    shape: Shape,
    /// None where all is left to NCCL.
    scope: Option<Scope>,
}

const NODES_MAX: usize = (1 << 28) - 1;

/// Never null: NCCL accepts null, but a null pointer shows nothing in a debugger.
fn dress(asker: Asker) -> *mut c_void {
    let Asker { shape, scope } = asker;
    let ranks = shape.ranks.min(u32::MAX as usize) << 32;
    let bit = |is_set: Option<bool>, place: u32| usize::from(is_set == Some(true)) << place;
    let flags = bit(scope.map(|it| it.without_table), 3) | bit(scope.map(|it| it.channels), 2);
    ptr::without_provenance_mut(ranks | shape.nodes.min(NODES_MAX) << 4 | flags | bit(Some(scope.is_some()), 1) | 1)
}

fn undress(context: *mut c_void) -> Asker {
    let value = context.addr();
    let bit = |place: u32| value >> place & 1 == 1;
    let shape = Shape { ranks: value >> 32, nodes: value >> 4 & NODES_MAX };
    Asker { shape, scope: bit(1).then(|| Scope { channels: bit(2), without_table: bit(3) }) }
}

/// # Safety
/// `context` is null or a place for the context.
unsafe fn init(comm: Option<u64>, shape: Shape, context: *mut *mut c_void) -> ncclResult_t {
    guard::<12>("tuner init", || {
        // SAFETY: this function's contract.
        let mut context = unsafe { Out::new(context, "context") }?;
        context.set(dress(Asker { shape, scope: facade::bind_tuner(comm, shape) }));
        Ok(())
    })
}

unsafe extern "C" fn init_v3(
    ranks: usize,
    nodes: usize,
    _logger: ncclDebugLogger_t,
    context: *mut *mut c_void,
) -> ncclResult_t {
    // SAFETY: NCCL's promise: a place for the context.
    unsafe { init(None, Shape { ranks, nodes }, context) }
}

unsafe extern "C" fn init_v5(
    context: *mut *mut c_void,
    comm: u64,
    ranks: usize,
    nodes: usize,
    _logger: ncclDebugLogger_t,
    _nvlink_domains: *mut c_void,
    _constants: *mut c_void,
) -> ncclResult_t {
    // SAFETY: NCCL's promise: a place for the context.
    unsafe { init(Some(comm), Shape { ranks, nodes }, context) }
}

/// NCCL 2.20 and 2.21 take the number of channels as it is, also when it is more than the communicator has. It has two
/// at least.
const CHANNELS_MAX_V2: u32 = 2;

unsafe extern "C" fn get_coll_info_v2(
    context: *mut c_void,
    collective: c_int,
    bytes: usize,
    coll_net: c_int,
    _nvls: c_int,
    _operations: c_int,
    algorithm: *mut c_int,
    protocol: *mut c_int,
    channels: *mut c_int,
) -> ncclResult_t {
    guard::<12>("getCollInfo", || {
        let Asker { shape, scope: Some(scope) } = undress(context) else { return Ok(()) };
        let Some(collective) = collective_of(collective) else { return Ok(()) };
        // NCCL does not pass on what the user excluded, and a host with a collective network is meant to use it.
        if !scope.without_table || coll_net != 0 {
            return Ok(());
        }
        let question = Question { shape, collective, bytes };
        // PAT came with 2.23.
        let Some(way) = tuning::advise(&question, |algorithm, _| algorithm != Algorithm::Pat) else { return Ok(()) };
        let (row, column) = place(way.algorithm, way.protocol);
        // SAFETY: NCCL's promise: places for the numbers.
        let (mut algorithm, mut protocol) =
            unsafe { (Out::new(algorithm, "algorithm")?, Out::new(protocol, "protocol")?) };
        algorithm.set(row as c_int);
        protocol.set(column as c_int);
        if scope.channels && way.channels <= CHANNELS_MAX_V2 {
            // SAFETY: as above.
            unsafe { Out::new(channels, "nChannels") }?.set(way.channels as c_int);
        }
        Ok(())
    })
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
        let Asker { shape, scope: Some(scope) } = undress(context) else { return Ok(()) };
        let Some(collective) = collective_of(collective) else { return Ok(()) };
        // SAFETY: NCCL's promise: an array of that many rows of that many times, whatever its type says.
        let mut costs = unsafe { Costs::new(table.cast(), algorithms, protocols) }?;
        let question = Question { shape, collective, bytes };
        let Some(way) = tuning::advise(&question, |algorithm, protocol| costs.has(algorithm, protocol)) else {
            return Ok(());
        };
        costs.choose(way);
        if scope.channels && way.channels < MANY {
            // SAFETY: NCCL's promise: a place for the number.
            unsafe { Out::new(channels, "nChannels") }?.set(way.channels as c_int);
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

/// The row and the column of NCCL's table.
fn place(algorithm: Algorithm, protocol: Protocol) -> (usize, usize) {
    let row = match algorithm {
        Algorithm::Tree => NCCL_ALGO_TREE,
        Algorithm::Ring => NCCL_ALGO_RING,
        Algorithm::Pat => NCCL_ALGO_PAT,
    };
    let column = match protocol {
        Protocol::LL => NCCL_PROTO_LL,
        Protocol::Simple => NCCL_PROTO_SIMPLE,
    };
    (row as usize, column as usize)
}

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

    /// The place of a combination; releases before 2.23 have fewer algorithms.
    fn index(&self, algorithm: Algorithm, protocol: Protocol) -> Option<usize> {
        let (row, column) = place(algorithm, protocol);
        let index = row * self.protocols + column;
        (column < self.protocols && index < self.times.len()).then_some(index)
    }

    /// Whether NCCL has the combination and does not rule it out.
    fn has(&self, algorithm: Algorithm, protocol: Protocol) -> bool {
        self.index(algorithm, protocol).is_some_and(|index| self.times[index] >= 0.0)
    }

    /// Makes a combination the cheapest.
    fn choose(&mut self, way: Way) {
        if let Some(index) = self.index(way.algorithm, way.protocol) {
            self.times[index] = 0.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_carries_the_communicator_and_is_never_null() {
        let scopes = [(false, false), (false, true), (true, false), (true, true)];
        let scopes = scopes.map(|(channels, without_table)| Some(Scope { channels, without_table }));
        for scope in scopes.into_iter().chain([None]) {
            for shape in [Shape { ranks: 1, nodes: 1 }, Shape { ranks: 16_384, nodes: 2_048 }] {
                let asker = Asker { shape, scope };
                assert!(!dress(asker).is_null());
                assert_eq!(undress(dress(asker)), asker);
            }
        }
    }

    #[test]
    fn what_nccl_rules_out_and_what_is_not_in_the_table_is_not_there() {
        let mut times = [[10.0_f32, -1.0, -1.0], [40.0, 50.0, 60.0]];
        // SAFETY: the array is that large.
        let mut costs = unsafe { Costs::new(times.as_mut_ptr().cast(), 2, 3) }.unwrap();
        assert!(costs.has(Algorithm::Tree, Protocol::LL) && costs.has(Algorithm::Ring, Protocol::Simple));
        assert!(!costs.has(Algorithm::Tree, Protocol::Simple) && !costs.has(Algorithm::Pat, Protocol::Simple));
        costs.choose(Way { algorithm: Algorithm::Ring, protocol: Protocol::Simple, channels: 1 });
        costs.choose(Way { algorithm: Algorithm::Pat, protocol: Protocol::Simple, channels: 1 });
        assert_eq!(times, [[10.0, -1.0, -1.0], [40.0, 50.0, 0.0]]);
        // SAFETY: null is refused before anything is read.
        assert!(unsafe { Costs::new(ptr::null_mut(), 3, 3) }.is_err());
        // SAFETY: the number of rows is refused before anything is read.
        assert!(unsafe { Costs::new(times.as_mut_ptr().cast(), -1, 3) }.is_err());
    }
}

//! How to run a collective between nodes over TCP: algorithm, protocol and number of channels.
//!
//! NCCL chooses from estimates made for RDMA. `cost` predicts the time of each way over sockets; the advice is the
//! cheapest one that NCCL allows.
//!
//! All ranks of a communicator must get the same advice, or the job hangs. So it is a function of the query alone, and
//! whether advice is given is decided once, when NCCL makes the communicator's tuner
//! ([`bind_tuner`](super::facade::bind_tuner)).

mod cost;

/// A communicator's size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    /// How many ranks it has.
    pub ranks: usize,
    /// On how many nodes.
    pub nodes: usize,
}

/// The collectives that NCCL requests advice about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "NCCL's names")]
pub(crate) enum Collective {
    Broadcast,
    Reduce,
    AllGather,
    ReduceScatter,
    AllReduce,
}

/// NCCL's query.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Question {
    /// The communicator.
    pub shape: Shape,
    /// The operation.
    pub collective: Collective,
    /// The larger of a rank's input and output, in bytes.
    pub bytes: usize,
}

/// NCCL's algorithms that the model knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "NCCL's names")]
pub(crate) enum Algorithm {
    Tree,
    Ring,
    Pat,
}

/// NCCL's protocols that the model knows. LL128 is left out: it was never measured over sockets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "NCCL's names")]
pub(crate) enum Protocol {
    LL,
    Simple,
}

/// A way to run a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Way {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The protocol.
    pub protocol: Protocol,
    /// The number of channels; [`MANY`] stands for all that NCCL has.
    pub channels: u32,
}

/// This many channels or more: all that NCCL made for the speed of the network.
pub(crate) const MANY: u32 = 8;

/// The numbers of channels that are compared.
const CHANNELS: [u32; 4] = [1, 2, 4, MANY];

/// The advice that is allowed for a communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Scope {
    /// Whether the number of channels may be set: not where the user set a minimum.
    pub channels: bool,
    /// Whether the algorithm and the protocol may be set without NCCL's table, which shows what the user excluded.
    pub without_table: bool,
}

/// Up to this many bytes the network decides even where a node has several GPUs. Above, NVLink's part matters, and
/// NCCL's own estimates are kept.
const SEVERAL_GPUS_MAX: usize = 4 << 20;

/// The cheapest way for which `is_allowed` holds; None where NCCL's own choice stays.
pub(crate) fn advise(question: &Question, is_allowed: impl Fn(Algorithm, Protocol) -> bool) -> Option<Way> {
    let Shape { ranks, nodes } = question.shape;
    if nodes < 2 || (ranks > nodes && question.bytes > SEVERAL_GPUS_MAX) {
        return None;
    }
    let mut best: Option<(f32, Way)> = None;
    for &(algorithm, protocol) in candidates(question.collective) {
        if !is_allowed(algorithm, protocol) {
            continue;
        }
        for channels in CHANNELS {
            let way = Way { algorithm, protocol, channels };
            let time = cost::microseconds(question, way);
            if best.is_none_or(|(least, _)| time < least) {
                best = Some((time, way));
            }
        }
    }
    best.map(|(_, way)| way)
}

/// NCCL has trees for all-reduces and PAT for all-gathers and reduce-scatters, and neither for the rest.
fn candidates(collective: Collective) -> &'static [(Algorithm, Protocol)] {
    use Algorithm::{Pat, Ring, Tree};
    use Protocol::{LL, Simple};
    match collective {
        Collective::AllReduce => &[(Tree, LL), (Ring, LL), (Tree, Simple), (Ring, Simple)],
        Collective::AllGather | Collective::ReduceScatter => &[(Ring, LL), (Pat, Simple), (Ring, Simple)],
        Collective::Broadcast | Collective::Reduce => &[(Ring, LL), (Ring, Simple)],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(ranks: usize, nodes: usize, collective: Collective, bytes: usize) -> Option<Way> {
        advise(&Question { shape: Shape { ranks, nodes }, collective, bytes }, |_, _| true)
    }

    #[test]
    fn inside_a_node_and_where_nvlink_counts_nccl_decides() {
        assert_eq!(chosen(8, 1, Collective::AllReduce, 1 << 20), None);
        assert_eq!(chosen(16, 2, Collective::AllReduce, 64 << 20), None);
        assert!(chosen(16, 2, Collective::AllReduce, 128 << 10).is_some());
    }

    #[test]
    fn what_nccl_rules_out_is_not_advised() {
        let question = Question { shape: Shape { ranks: 2, nodes: 2 }, collective: Collective::AllReduce, bytes: 8 };
        let only = |wanted| advise(&question, |algorithm, protocol| (algorithm, protocol) == wanted);
        let simple = only((Algorithm::Ring, Protocol::Simple)).expect("a ring is left");
        assert_eq!((simple.algorithm, simple.protocol), (Algorithm::Ring, Protocol::Simple));
        assert_eq!(advise(&question, |_, _| false), None);
    }

    /// LL doubles the bytes on the wire and is copied by NCCL's proxy thread: with many bytes it never pays.
    #[test]
    fn large_operations_never_use_ll_and_small_ones_always_do() {
        for nodes in [2, 3, 4, 8] {
            for collective in [Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter] {
                let protocol = |bytes: usize| chosen(nodes, nodes, collective, bytes).expect("advice").protocol;
                assert_eq!(protocol(8), Protocol::LL, "{collective:?} on {nodes}");
                assert_eq!(protocol(nodes << 20), Protocol::Simple, "{collective:?} on {nodes}");
            }
        }
    }

    #[test]
    fn among_many_nodes_small_operations_take_a_logarithmic_number_of_steps() {
        assert_eq!(chosen(64, 64, Collective::AllReduce, 64 << 10).expect("advice").algorithm, Algorithm::Tree);
        assert_eq!(chosen(64, 64, Collective::AllGather, 1 << 20).expect("advice").algorithm, Algorithm::Pat);
        assert_eq!(chosen(64, 64, Collective::AllReduce, 1 << 30).expect("advice").algorithm, Algorithm::Ring);
    }

    #[test]
    fn small_operations_take_one_channel_and_the_largest_all_that_there_are() {
        for nodes in [2, 4, 8] {
            let channels = |bytes: usize| {
                let question =
                    Question { shape: Shape { ranks: nodes, nodes }, collective: Collective::AllReduce, bytes };
                let ring = (Algorithm::Ring, Protocol::Simple);
                advise(&question, |algorithm, protocol| (algorithm, protocol) == ring).expect("a ring").channels
            };
            assert_eq!([1 << 10, nodes << 27].map(channels), [1, MANY], "{nodes}");
        }
    }
}

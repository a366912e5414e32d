//! What Towline knows better than NCCL's own model of the network: which protocol and how many channels suit TCP.
//!
//! NCCL chooses an algorithm and a protocol for each collective from estimates made for RDMA. Two things are different
//! over sockets, and both were measured (`docs/performance.md`):
//!
//! - **LL and LL128 send flags along with the data**, LL as many bytes as data, so that the GPU sees it arrive word by
//!   word. RDMA hides that; a socket copies every byte, in NCCL's own thread. So these protocols get slower sooner.
//! - **Each channel is a message of its own.** Eight channels move large operations at full speed, but cut those of up to
//!   a few MiB into messages that take longer to hand over than to copy.
//!
//! All ranks must give the same answer: it depends on the question alone.

use super::process::process;

/// A communicator's size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// How many ranks it has.
    pub ranks: usize,
    /// On how many nodes.
    pub nodes: usize,
}

/// The collectives that NCCL asks about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "NCCL's names")]
pub enum Collective {
    Broadcast,
    Reduce,
    AllGather,
    ReduceScatter,
    AllReduce,
}

/// What NCCL wants to know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Question {
    /// Of which communicator.
    pub shape: Shape,
    /// Which operation.
    pub collective: Collective,
    /// The larger of what a rank gives and what it gets.
    pub bytes: usize,
}

/// A protocol for a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "NCCL's names")]
pub enum Tree {
    LL,
    Simple,
}

/// What to change of NCCL's own plan.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Advice {
    /// Time to add to NCCL's estimate for LL, in microseconds.
    pub ll_costs_more_us: f32,
    /// The same for LL128.
    pub ll128_costs_more_us: f32,
    /// Whether a tree is best, whatever its estimate says, and with which protocol.
    pub tree: Option<Tree>,
    /// Whether PAT is to be left out.
    pub avoids_pat: bool,
    /// Whether LL and trees are to be left out.
    pub avoids_ll_and_trees: bool,
    /// On how many channels at most; None leaves it to NCCL.
    pub channels: Option<i32>,
}

/// Bytes that one of NCCL's network threads moves through a socket in a microsecond beside what it moves anyway.
///
/// What the same bytes take of the network is in NCCL's estimate already, by the speed that is reported. With both, two ranks
/// turn from LL to Simple at 141 KiB where that is 77 Gbit/s, at 74 KiB with 25 and at 36 KiB with 10 (`abi::tuner` has the
/// estimates in a test). Measured at 77 with LL in a ring, beside Simple: 0.73 of its time at 32 KiB, 0.91 at 64 and at
/// 128 KiB, but 1.45 at 256.
const LL_BYTES_PER_US: f32 = 7500.0;

/// LL128 has flags in 8 of 128 bytes, but also sends larger pieces at a time and so overlaps less: measured, it loses
/// about half as much as LL.
const LL128_SHARE: f32 = 0.5;

/// The advice for a communicator whose traffic between nodes is Towline's over TCP, while that is wanted; else none.
pub fn advise(question: &Question) -> Option<Advice> {
    process().tunes().then(|| advice(question)).flatten()
}

/// The advice itself.
pub(crate) fn advice(question: &Question) -> Option<Advice> {
    if question.shape.nodes < 2 {
        return None;
    }
    let on_the_wire = on_the_wire(question);
    let ll_costs_more_us = on_the_wire / LL_BYTES_PER_US;
    Some(Advice {
        ll_costs_more_us,
        ll128_costs_more_us: ll_costs_more_us * LL128_SHARE,
        tree: tree(question),
        avoids_pat: question.bytes > PAT_MAX.max(PAT_PART_MAX * question.shape.ranks),
        avoids_ll_and_trees: exceeds_ll(question),
        channels: channels(question),
    })
}

/// Bytes that a rank sends to the next one in a ring.
fn on_the_wire(question: &Question) -> f32 {
    let ranks = question.shape.ranks.max(2) as f32;
    let share = match question.collective {
        Collective::Broadcast | Collective::Reduce => 1.0,
        Collective::AllGather | Collective::ReduceScatter => (ranks - 1.0) / ranks,
        Collective::AllReduce => 2.0 * (ranks - 1.0) / ranks,
    };
    question.bytes as f32 * share
}

/// PAT cuts all-gathers and reduce-scatters into more, smaller messages than a ring does. Measured with two ranks: 0.73 of the
/// ring's time at 256 KiB, 2.1 to 2.6 times at 1 MiB.
const PAT_MAX: usize = 512 << 10;
/// And parts of up to this many bytes, which many ranks have of more than that: a ring would have a step for each of them. Not
/// measured with more than eight ranks, for which the two are the same.
const PAT_PART_MAX: usize = 64 << 10;

/// All-reduces up to this many bytes: a tree needs as many messages one after the other as a ring with two ranks, but half of
/// all, and with more ranks fewer. Measured with two ranks and LL: 0.88 of the ring's time at 8 B, 0.84 at 2 KiB, 0.98 at
/// 4 KiB, but 1.12 at 8 KiB and 1.33 at 16 KiB.
const TREE_LL_MAX: usize = 8 << 10;
/// The same with two ranks.
const TREE_LL_MAX_OF_TWO: usize = 4 << 10;

/// Also all-reduces of two ranks of a few hundred KiB: in a ring each is two messages of 32 to 64 KiB per step, in a tree one of
/// twice that. Measured with Simple, 256 and 512 KiB: 0.8 and 0.63 of the ring's time, at 1 MiB it loses. With four ranks a
/// ring on one channel takes 0.66 of a tree's time at 512 KiB.
const TREE_SIMPLE: std::ops::Range<usize> = (192 << 10) + 1..768 << 10;

fn tree(question: &Question) -> Option<Tree> {
    if question.collective != Collective::AllReduce {
        return None;
    }
    let of_two = question.shape.ranks <= 2;
    let ll_max = if of_two { TREE_LL_MAX_OF_TWO } else { TREE_LL_MAX };
    match question.bytes {
        bytes if bytes <= ll_max => Some(Tree::LL),
        bytes if of_two && TREE_SIMPLE.contains(&bytes) => Some(Tree::Simple),
        _ => None,
    }
}

/// What LL sends in one message: NCCL's buffers for it hold as many bytes of flags.
const LL_MESSAGE: usize = 32 << 10;

/// All-reduces among so many nodes go round in a ring wherever they do not go with LL. Measured: with Simple 1.0, 0.87 and 0.57
/// of a tree's time at 128, 256 and 512 KiB with four ranks, 0.84, 0.55 and 0.7 with three. NCCL's estimates have the tree
/// ahead up to 256 KiB. Among many they are right: a ring has as many steps, a tree's messages are as long as ever.
const RING_NODES: usize = 4;

/// The channels of all-reduces among so many nodes go by their parts, in whichever way they go. Measured with eight ranks, two
/// cores each: one channel takes 0.68, 0.85 and 0.71 of the time at 128 KiB, 512 KiB and 2 MiB, two 0.61 at 8 MiB.
const PART_NODES: usize = 8;

/// What goes from a rank to the next in each step of a long ring: one with a rank on each of more than two nodes, in which every
/// step goes over the network, and there are two or more one after the other. None where it is not one, or where the
/// data does not go round in as many parts as there are ranks.
fn part_of_long_ring(question: &Question) -> Option<usize> {
    let Shape { ranks, nodes } = question.shape;
    let goes_round = match question.collective {
        Collective::AllGather | Collective::ReduceScatter => true,
        Collective::AllReduce => nodes <= PART_NODES,
        Collective::Broadcast | Collective::Reduce => false,
    };
    (nodes > 2 && ranks == nodes && goes_round).then(|| question.bytes.div_ceil(nodes))
}

/// Whether LL would cut each part of a long ring in two, which on the one channel that it has then go one after the other in
/// every step. Measured with four ranks: at 256 KiB LL takes 1.4 times as long as Simple, at 512 KiB 2.4 times.
fn exceeds_ll(question: &Question) -> bool {
    let has_trees = question.collective == Collective::AllReduce && question.shape.nodes > RING_NODES;
    !has_trees && part_of_long_ring(question).is_some_and(|part| part > LL_MESSAGE)
}

/// Channels by size. Each step of a ring waits for the one before, and a message on each channel must be handed over in it: the
/// more steps, the larger the parts that are worth another channel. Above the last size NCCL's own number is right.
///
/// Measured with two ranks: four channels instead of two take 0.92 and 0.96 of the time at 512 KiB and 1 MiB, three at 512 KiB
/// 0.96; one instead of two for an all-reduce of 64 KiB with LL 0.85. With four on four nodes, times as a part of those with
/// the numbers for two: one channel 0.86, 0.75 and 0.61 for all-reduces of 128 KiB, 256 KiB and 1 MiB, 0.56 to 0.87 for
/// all-gathers of 64 KiB to 1 MiB; two channels 0.84 and 0.87 for those of 4 MiB, four 0.9 of 16 and 64 MiB.
fn channels(question: &Question) -> Option<i32> {
    let one = if question.collective == Collective::AllReduce { 64 << 10 } else { (64 << 10) - 1 };
    let (size, [one, two, four]) = match part_of_long_ring(question) {
        Some(part) => (part, [128 << 10, 2 << 20, 16 << 20]),
        None => (question.bytes, [one, 384 << 10, 4 << 20]),
    };
    match size {
        size if size <= one => Some(1),
        size if size <= two => Some(2),
        size if size <= four => Some(4),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question(nodes: usize, bytes: usize) -> Question {
        Question { shape: Shape { ranks: 2, nodes }, collective: Collective::AllReduce, bytes }
    }

    #[test]
    fn inside_one_node_nothing_is_changed() {
        assert_eq!(advice(&question(1, 1 << 20)), None);
    }

    #[test]
    fn the_flags_cost_in_proportion_to_what_travels() {
        let small = advice(&question(2, 8)).unwrap();
        let large = advice(&question(2, 32 << 10)).unwrap();
        assert!(small.ll_costs_more_us < 0.1);
        assert!((large.ll_costs_more_us - 4.37).abs() < 0.01 && large.ll128_costs_more_us < large.ll_costs_more_us);
        let gathered = Question { collective: Collective::AllGather, ..question(2, 32 << 10) };
        assert!(advice(&gathered).unwrap().ll_costs_more_us < large.ll_costs_more_us);
    }

    #[test]
    fn trees_are_for_small_all_reduces_and_for_those_of_a_few_hundred_kib_and_pat_for_less_than_that() {
        let tree = |bytes: usize| advice(&question(2, bytes)).unwrap().tree;
        assert_eq!([8, 4 << 10, 5 << 10, 8 << 10].map(tree), [Some(Tree::LL), Some(Tree::LL), None, None]);
        let simple = Some(Tree::Simple);
        assert_eq!([64, 128, 256, 512, 1024].map(|kib| tree(kib << 10)), [None, None, simple, simple, None]);
        let among = |ranks, bytes| {
            advice(&Question { shape: Shape { ranks, nodes: ranks }, ..question(2, bytes) }).unwrap().tree
        };
        assert_eq!([8, 16, 256, 512, 1024].map(|kib| among(4, kib << 10)), [Some(Tree::LL), None, None, None, None]);
        let gathered = Question { collective: Collective::AllGather, ..question(2, 256 << 10) };
        assert!(advice(&gathered).unwrap().tree.is_none() && !advice(&gathered).unwrap().avoids_pat);
        assert!(advice(&Question { bytes: 1 << 20, ..gathered }).unwrap().avoids_pat);
        let avoids_pat = |nodes, kib| advice(&ring(nodes, Collective::AllGather, kib)).unwrap().avoids_pat;
        assert_eq!([4, 8, 64].map(|nodes| avoids_pat(nodes, 513)), [true, true, false]);
        assert_eq!([4096, 4097].map(|kib| avoids_pat(64, kib)), [false, true]);
    }

    #[test]
    fn channels_grow_with_the_size() {
        let of = |bytes| channels(&question(2, bytes));
        let steps = [8, 64 << 10, 65 << 10, 384 << 10, 512 << 10, 2 << 20, 4 << 20, 8 << 20, 1 << 30].map(of);
        assert_eq!(steps, [Some(1), Some(1), Some(2), Some(2), Some(4), Some(4), Some(4), None, None]);
        let gathered = |bytes| channels(&Question { collective: Collective::AllGather, ..question(2, bytes) });
        assert_eq!([63 << 10, 64 << 10].map(gathered), [Some(1), Some(2)]);
    }

    /// A rank on each of so many nodes.
    fn ring(nodes: usize, collective: Collective, kib: usize) -> Question {
        Question { shape: Shape { ranks: nodes, nodes }, collective, bytes: kib << 10 }
    }

    #[test]
    fn a_long_ring_has_channels_for_larger_parts_only() {
        let of = |nodes, kib| channels(&ring(nodes, Collective::AllGather, kib));
        let sizes = [64, 512, 513, 8 << 10, 16 << 10, 64 << 10, 65 << 10];
        assert_eq!(sizes.map(|kib| of(4, kib)), [Some(1), Some(1), Some(2), Some(2), Some(4), Some(4), None]);
        assert_eq!(sizes.map(|kib| of(4, kib)), sizes.map(|kib| of(8, 2 * kib)));
        // Where nodes have several ranks, most steps do not go over the network: as with two.
        let mixed =
            |ranks, kib: usize| channels(&Question { shape: Shape { ranks, nodes: 4 }, ..question(2, kib << 10) });
        assert_eq!([64, 512, 8 << 10].map(|kib| mixed(32, kib)), [Some(1), Some(4), None]);
        // Broadcasts do not go in parts, nor do all-reduces among many, for which NCCL builds trees.
        assert_eq!([32, 512].map(|kib| channels(&ring(4, Collective::Broadcast, kib))), [Some(1), Some(4)]);
        let reduced = |nodes| [64, 512, 8 << 10].map(|kib| channels(&ring(nodes, Collective::AllReduce, kib)));
        assert_eq!(
            [4, 8, 9].map(reduced),
            [[Some(1), Some(1), Some(2)], [Some(1), Some(1), Some(2)], [Some(1), Some(4), None]]
        );
    }

    #[test]
    fn a_long_ring_sends_parts_whole_and_few_nodes_need_no_tree_for_that() {
        let avoided = |question: Question| advice(&question).unwrap().avoids_ll_and_trees;
        let reduced = |nodes, kib| avoided(ring(nodes, Collective::AllReduce, kib));
        assert_eq!([128, 129, 4096].map(|kib| reduced(4, kib)), [false, true, true]);
        assert_eq!([96, 128].map(|kib| reduced(3, kib)), [false, true]);
        assert_eq!([256, 512, 4096].map(|kib| reduced(8, kib)), [false; 3]);
        assert!(!reduced(2, 4096));
        let eight_each = Question { shape: Shape { ranks: 32, nodes: 4 }, ..question(2, 4 << 20) };
        assert!(!avoided(eight_each));
    }
}

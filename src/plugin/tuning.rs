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

/// An algorithm with a protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "NCCL's names")]
pub enum Plan {
    TreeLL,
    TreeSimple,
    RingLL,
    /// LL128 where NCCL has it (between GPUs and cards that are close to each other), else LL.
    RingLL128,
}

/// What to change of NCCL's own plan.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Advice {
    /// Time to add to NCCL's estimate for LL, in microseconds.
    pub ll_costs_more_us: f32,
    /// The same for LL128.
    pub ll128_costs_more_us: f32,
    /// What is best, whatever its estimates say.
    pub best: Option<Plan>,
    /// Whether PAT is to be left out.
    pub avoids_pat: bool,
    /// On how many channels at most; None leaves it to NCCL.
    pub channels: Option<i32>,
}

/// Bytes that one of NCCL's network threads moves through a socket in a microsecond beside what it moves anyway. With this,
/// two ranks turn from LL to Simple between 128 and 192 KiB, which is where Simple overtakes (see [`RING_LL_MAX`]); with more
/// ranks, where as much travels in a step.
const LL_BYTES_PER_US: f32 = 6000.0;

/// LL128 has flags in 8 of 128 bytes, but also sends larger pieces at a time and so overlaps less: measured, it loses
/// about half as much as LL.
const LL128_SHARE: f32 = 0.5;

/// The advice for a communicator whose traffic between nodes is Towline's over TCP, while that is wanted; else none.
pub fn advise(question: &Question) -> Option<Advice> {
    process().tunes().then(|| advice(question)).flatten()
}

/// The advice itself.
fn advice(question: &Question) -> Option<Advice> {
    if question.shape.nodes < 2 {
        return None;
    }
    let on_the_wire = on_the_wire(question);
    let ll_costs_more_us = on_the_wire / LL_BYTES_PER_US;
    Some(Advice {
        ll_costs_more_us,
        ll128_costs_more_us: ll_costs_more_us * LL128_SHARE,
        best: best(question),
        avoids_pat: question.bytes > PAT_MAX,
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

/// All-reduces up to this many bytes: a tree needs as many messages one after the other as a ring with two ranks, but half of
/// all, and with more ranks fewer. Measured with two ranks and LL: 0.88 of the ring's time at 8 B, 0.84 at 2 KiB, 0.98 at
/// 4 KiB, but 1.12 at 8 KiB and 1.33 at 16 KiB.
const TREE_LL_MAX: usize = 8 << 10;
/// The same with two ranks.
const TREE_LL_MAX_OF_TWO: usize = 4 << 10;

/// All-reduces of two ranks up to this many bytes, in a ring with LL. Measured with Simple beside it: 0.72 of its time at
/// 32 KiB, 0.89 at 64 (one channel), 0.89 at 128 (two channels), 1.45 of the tree's with Simple at 256.
const RING_LL_MAX: usize = 144 << 10;

/// From here on LL128 is better than LL where NCCL has it: 0.93 and 0.96 of its time at 64 and 128 KiB, 1.10 at 32.
const RING_LL128_MIN: usize = 48 << 10;

/// Also all-reduces of a few hundred KiB whose parts are about as large: in a ring each is two messages of 32 to 64 KiB per
/// step, in a tree one of twice that. Measured with Simple and two ranks, 256 and 512 KiB: 0.8 and 0.63 of the ring's time, at
/// 1 MiB it loses; with four ranks, 512 KiB: 0.88, and 1.8 times at 1 MiB.
const TREE_SIMPLE_MAX: usize = 768 << 10;

fn best(question: &Question) -> Option<Plan> {
    if question.collective != Collective::AllReduce {
        return None;
    }
    let (bytes, of_two) = (question.bytes, question.shape.ranks <= 2);
    let part = bytes / question.shape.ranks.max(2);
    match bytes {
        _ if bytes <= if of_two { TREE_LL_MAX_OF_TWO } else { TREE_LL_MAX } => Some(Plan::TreeLL),
        _ if of_two && bytes < RING_LL128_MIN => Some(Plan::RingLL),
        _ if of_two && bytes <= RING_LL_MAX => Some(Plan::RingLL128),
        _ if part > 96 << 10 && bytes < TREE_SIMPLE_MAX => Some(Plan::TreeSimple),
        _ => None,
    }
}

/// Channels by size. Above 4 MiB NCCL's own number is right. Measured with two ranks: four instead of two at 512 KiB and 1 MiB
/// take 0.92 and 0.96 of the time, three at 512 KiB 0.96 (sixteen groups of processes each); one instead of two for an
/// all-reduce of 64 KiB with LL 0.85.
fn channels(question: &Question) -> Option<i32> {
    let one_until = if question.collective == Collective::AllReduce { 64 << 10 } else { (64 << 10) - 1 };
    match question.bytes {
        bytes if bytes <= one_until => Some(1),
        bytes if bytes >> 10 <= 384 => Some(2),
        bytes if bytes >> 10 <= 4096 => Some(4),
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
        assert!((large.ll_costs_more_us - 5.46).abs() < 0.01 && large.ll128_costs_more_us < large.ll_costs_more_us);
        let gathered = Question { collective: Collective::AllGather, ..question(2, 32 << 10) };
        assert!(advice(&gathered).unwrap().ll_costs_more_us < large.ll_costs_more_us);
    }

    #[test]
    fn what_is_best_for_all_reduces_changes_with_their_size_and_pat_is_for_small_ones() {
        let best = |bytes: usize| advice(&question(2, bytes)).unwrap().best;
        assert_eq!([8, 4 << 10].map(best), [Some(Plan::TreeLL); 2]);
        assert_eq!([5 << 10, 8 << 10, 32 << 10].map(best), [Some(Plan::RingLL); 3]);
        assert_eq!([48 << 10, 64 << 10, 128 << 10].map(best), [Some(Plan::RingLL128); 3]);
        let simple = Some(Plan::TreeSimple);
        assert_eq!([160, 256, 512, 1024].map(|kib| best(kib << 10)), [None, simple, simple, None]);
        let among = |ranks, bytes| {
            advice(&Question { shape: Shape { ranks, nodes: ranks }, ..question(2, bytes) }).unwrap().best
        };
        assert_eq!([8, 16, 64, 256].map(|kib| among(4, kib << 10)), [Some(Plan::TreeLL), None, None, None]);
        assert_eq!([512, 1024].map(|kib| among(4, kib << 10)), [simple, None]);
        assert_eq!([256, 512, 1024, 4096].map(|kib| among(8, kib << 10)), [None; 4]);
        let gathered = Question { collective: Collective::AllGather, ..question(2, 256 << 10) };
        assert!(advice(&gathered).unwrap().best.is_none() && !advice(&gathered).unwrap().avoids_pat);
        assert!(advice(&Question { bytes: 1 << 20, ..gathered }).unwrap().avoids_pat);
    }

    #[test]
    fn channels_grow_with_the_size() {
        let of = |bytes| channels(&question(2, bytes));
        let steps = [8, 64 << 10, 65 << 10, 384 << 10, 512 << 10, 2 << 20, 4 << 20, 8 << 20, 1 << 30].map(of);
        assert_eq!(steps, [Some(1), Some(1), Some(2), Some(2), Some(4), Some(4), Some(4), None, None]);
        let gathered = |bytes| channels(&Question { collective: Collective::AllGather, ..question(2, bytes) });
        assert_eq!([63 << 10, 64 << 10].map(gathered), [Some(1), Some(2)]);
    }
}

//! The algorithm over links in memory, one thread per rank. The links hold a send back until its receive is posted,
//! return "not now" and "not yet" from a seed, or fail.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use super::super::{CHUNK_ELEMENTS, Link, Ring, SLOTS, pattern, program};
use super::Buffers;

/// One direction between two ranks: receives that were posted, and messages that filled them.
#[derive(Default)]
struct Wire {
    /// Slots with the elements they have room for.
    posted: VecDeque<(usize, usize)>,
    arrived: [Option<Vec<f32>>; SLOTS],
    broken: bool,
}

/// A link without buffering: a send is over only when its receive was posted and filled, the strictest transport there
/// is. Slots are checked not to be touched while in flight.
struct StrictLink {
    to_right: Arc<Mutex<Wire>>,
    from_left: Arc<Mutex<Wire>>,
    send_slots: Vec<Vec<f32>>,
    receive_slots: Vec<Vec<f32>>,
    unsent: VecDeque<(usize, usize)>,
    random: u64,
    shrinks: bool,
    since_progress: Instant,
}

impl StrictLink {
    fn chance(&mut self) -> bool {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        !self.random.is_multiple_of(4)
    }

    /// Moves what both sides are ready for.
    fn pump(&mut self) {
        let mut wire = self.to_right.lock().unwrap();
        while let (Some(&(slot, elements)), Some(&(to, room))) = (self.unsent.front(), wire.posted.front()) {
            assert!(elements <= room, "a message longer than its receive");
            let sent = if self.shrinks { elements - 1 } else { elements };
            wire.arrived[to] = Some(self.send_slots[slot][..sent].to_vec());
            wire.posted.pop_front();
            self.unsent.pop_front();
            self.since_progress = Instant::now();
        }
    }
}

impl Link for StrictLink {
    type Error = String;

    fn slots(&mut self, receive: Option<usize>, send: Option<usize>) -> (&[f32], &mut [f32]) {
        assert!(self.unsent.iter().all(|&(slot, _)| Some(slot) != send), "a slot in flight is written");
        let received = receive.map_or(&[][..], |slot| &self.receive_slots[slot]);
        (received, send.map_or(&mut [][..], |slot| &mut self.send_slots[slot]))
    }

    fn start_send(&mut self, slot: usize, elements: usize) -> Result<bool, String> {
        if !self.chance() {
            return Ok(false);
        }
        self.unsent.push_back((slot, elements));
        assert!(self.unsent.len() <= SLOTS);
        self.pump();
        Ok(true)
    }

    fn start_receive(&mut self, slot: usize, elements: usize) -> Result<bool, String> {
        if !self.chance() {
            return Ok(false);
        }
        self.from_left.lock().unwrap().posted.push_back((slot, elements));
        Ok(true)
    }

    fn is_sent(&mut self, slot: usize) -> Result<bool, String> {
        self.pump();
        Ok(self.unsent.iter().all(|&(unsent, _)| unsent != slot) && self.chance())
    }

    fn received_bytes(&mut self, slot: usize) -> Result<Option<usize>, String> {
        self.pump();
        if self.from_left.lock().unwrap().broken {
            return Err("broken".into());
        }
        let Some(message) = self.from_left.lock().unwrap().arrived[slot].take() else { return Ok(None) };
        self.receive_slots[slot][..message.len()].copy_from_slice(&message);
        Ok(Some(message.len() * size_of::<f32>()))
    }

    fn idle(&mut self) -> Result<(), String> {
        self.pump();
        thread::yield_now();
        if self.since_progress.elapsed() > Duration::from_secs(20) { Err("locked up".into()) } else { Ok(()) }
    }

    fn wrong_size(&self, expected: usize, arrived: usize) -> String {
        format!("{arrived} bytes for {expected}")
    }
}

fn ring(ranks: usize, seed: u64, largest: usize) -> Vec<StrictLink> {
    let wires: Vec<Arc<Mutex<Wire>>> = (0..ranks).map(|_| Arc::default()).collect();
    let link = |rank: usize| StrictLink {
        to_right: Arc::clone(&wires[rank]),
        from_left: Arc::clone(&wires[(rank + ranks - 1) % ranks]),
        send_slots: vec![vec![f32::NAN; largest]; SLOTS],
        receive_slots: vec![vec![f32::NAN; largest]; SLOTS],
        unsent: VecDeque::new(),
        random: seed * 1000 + rank as u64 + 1,
        shrinks: false,
        since_progress: Instant::now(),
    };
    (0..ranks).map(link).collect()
}

/// Three all-reduces in a row on every rank, the last in place; the number of wrong elements per rank.
fn reduce(links: Vec<StrictLink>, count: usize, largest: usize) -> Vec<Result<usize, String>> {
    let ranks = links.len();
    thread::scope(|scope| {
        let run = |(rank, link): (usize, StrictLink)| {
            scope.spawn(move || {
                let program = program::all_reduce(rank, ranks, count, largest);
                let mut ring = Ring::new(link);
                let mut wrong = 0;
                for iteration in 0..3 {
                    let mut input = vec![0.0; count];
                    pattern::fill(&mut input, rank, iteration);
                    let mut output = vec![f32::NAN; count];
                    if iteration == 2 {
                        output.copy_from_slice(&input);
                        ring.run(&program, Buffers::InPlace(&mut output))?;
                    } else {
                        ring.run(&program, Buffers::OutOfPlace { input: &input, output: &mut output })?;
                    }
                    wrong += pattern::count_wrong(&output, ranks, iteration);
                }
                ring.drain()?;
                Ok(wrong)
            })
        };
        let threads: Vec<_> = links.into_iter().enumerate().map(run).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn every_rank_ends_with_the_sum() {
    for ranks in [2, 3, 5, 8] {
        for (seed, count) in [1, 2, 7, 1000, 123_457].into_iter().enumerate() {
            // A largest chunk of 64 elements makes many rounds, which is where a ring could lock up.
            for largest in [64, CHUNK_ELEMENTS] {
                if largest == 64 && count > 100_000 && ranks > 3 {
                    continue;
                }
                let wrong = reduce(ring(ranks, seed as u64 + 1, largest), count, largest);
                assert!(wrong.iter().all(|wrong| *wrong == Ok(0)), "{ranks} ranks, {count} elements: {wrong:?}");
            }
        }
    }
}

#[test]
fn a_message_of_another_size_is_an_error() {
    let mut links = ring(2, 1, 64);
    links[0].shrinks = true;
    links[0].since_progress = Instant::now() + Duration::from_secs(3600);
    let to_rank_0 = Arc::clone(&links[0].from_left);
    let watched = thread::spawn(move || reduce(links, 100, 64));
    // Rank 1 stops at once; rank 0 is then notified that its link is gone.
    thread::sleep(Duration::from_millis(200));
    to_rank_0.lock().unwrap().broken = true;
    let outcome = watched.join().unwrap();
    assert!(outcome[1].as_ref().is_err_and(|error| error.contains("bytes for")), "{outcome:?}");
    assert_eq!(outcome[0], Err("broken".into()));
}

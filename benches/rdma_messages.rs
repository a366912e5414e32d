//! Messages through any plugin's table between two RDMA devices, for `benches/rdma_compare.sh`, which runs it in the
//! RDMA test machine.
//!
//!     rdma_messages count PLUGIN SIZE PARTS MESSAGES
//!     rdma_messages idle PLUGIN SIZE PARTS CALLS
//!     rdma_messages groups PLUGIN SIZE PARTS MESSAGES
//!
//! `count` is for a program that counts instructions or system calls: both ends take turns in one thread, and each
//! waits until the other has come so far that its next call finds what it needs. So a message costs the calls that it
//! cannot do without, the same in every run: a receive, its sends, and a test that says done for each. Under
//! `valgrind --tool=callgrind --toggle-collect='*counted*'` only these calls count.
//!
//! `idle` tests a receive whose messages do not come, so many times.
//!
//! `groups` moves messages in groups of PARTS, which one receive takes, each part with a tag of its own; two groups are
//! in flight. Prints the bandwidth in MB/s.

#[path = "../tests/support/pair.rs"]
#[allow(dead_code, unreachable_pub, reason = "tests use all of it")]
mod pair;

use std::time::{Duration, Instant};

use pair::Pair;
use towline::host::{Context, Memory, Mr, Net, Part, RecvComm, Request, SendComm};

/// Groups in flight.
const AHEAD: usize = 2;

/// What the slowest emulated machine moves in a second, to wait long enough.
const BYTES_PER_SECOND: u64 = 10_000_000;

/// How long a line or a short message takes at most; so short that a plugin's own thread seldom does its work
/// meanwhile, which would not be counted.
const A_WHILE: Duration = Duration::from_micros(200);

#[inline(never)]
fn counted<T>(call: impl FnOnce() -> T) -> T {
    call()
}

struct Job {
    size: usize,
    parts: usize,
    messages: usize,
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [mode, plugin, size, parts, messages] = arguments.as_slice() else {
        // `cargo bench` runs every benchmark, and this one needs devices.
        println!("usage: rdma_messages count|idle|groups PLUGIN SIZE PARTS MESSAGES");
        return;
    };
    let number = |text: &String| text.parse().expect("a number");
    let job = Job { size: number(size), parts: number(parts), messages: number(messages) };
    let net = Net::open(plugin, None).expect("the plugin");
    let context = net.init().expect("init");
    let last = context.devices().expect("devices") - 1;
    let pair = connect(&context, last);
    match mode.as_str() {
        "count" => count(&pair, &job),
        "idle" => idle(&pair, &job),
        "groups" => groups(pair, &job),
        other => panic!("{other} is none of them"),
    }
}

fn connect(context: &Context, last: i32) -> Pair {
    Pair::between((context, 0), (context, last)).expect("a connection")
}

/// Memory for some parts, registered.
fn memory(job: &Job, groups: usize, register: impl Fn(&Memory) -> towline::host::Result<Mr>) -> Vec<(Memory, Mr)> {
    let part = |_| {
        let memory = Memory::new(job.size);
        let mr = register(&memory).expect("registered");
        (memory, mr)
    };
    (0..groups * job.parts).map(part).collect()
}

fn parts_of<'a>(memory: &'a [(Memory, Mr)], job: &Job, group: usize) -> Vec<Part<'a>> {
    let group = &memory[group % (memory.len() / job.parts) * job.parts..][..job.parts];
    let part = |(tag, (memory, mr)): (usize, &'a (Memory, Mr))| Part::all(memory, Some(mr)).tagged(tag as i32);
    group.iter().enumerate().map(part).collect()
}

fn count(pair: &Pair, job: &Job) {
    let source = memory(job, 1, |memory| pair.send.register(memory));
    let target = memory(job, 1, |memory| pair.recv.register(memory));
    let (sources, targets) = (parts_of(&source, job, 0), parts_of(&target, job, 0));
    let bytes = (job.size * job.parts) as u64;
    let while_it_travels = A_WHILE + Duration::from_micros(bytes * 1_000_000 / BYTES_PER_SECOND);
    let mut early = 0;
    let mut requests = Vec::with_capacity(job.parts);
    for _ in 0..job.messages {
        let receive = loop {
            // SAFETY: the memory outlives the connection's transfers, and nothing else uses it.
            let receive = counted(|| unsafe { pair.recv.irecv(&targets) });
            if let Some(receive) = receive.expect("irecv") {
                break receive;
            }
            early += 1;
        };
        std::thread::sleep(A_WHILE);
        for part in &sources {
            requests.push(loop {
                // SAFETY: as above.
                let send = counted(|| unsafe { pair.send.isend(*part) });
                if let Some(send) = send.expect("isend") {
                    break send;
                }
                early += 1;
            });
        }
        std::thread::sleep(while_it_travels);
        for send in requests.drain(..) {
            while counted(|| pair.send.test(&send)).expect("a send").is_none() {
                early += 1;
                std::thread::sleep(while_it_travels);
            }
        }
        while counted(|| pair.recv.test(&receive)).expect("a receive").is_none() {
            early += 1;
            std::thread::sleep(while_it_travels);
        }
    }
    println!("calls that came too early {early}");
}

fn idle(pair: &Pair, job: &Job) {
    let target = memory(job, 1, |memory| pair.recv.register(memory));
    // SAFETY: the memory outlives the connection's transfers, and nothing else uses it.
    let receive = unsafe { pair.recv.post(&parts_of(&target, job, 0)) }.expect("irecv");
    std::thread::sleep(Duration::from_millis(100));
    for _ in 0..job.messages {
        assert!(counted(|| pair.recv.test(&receive)).expect("a receive").is_none(), "nothing was sent");
    }
    // The plugin must not write into memory that is gone.
    std::mem::forget(target);
}

fn groups(pair: Pair, job: &Job) {
    let Pair { send, recv } = pair;
    let start = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| sending(&send, job));
        receiving(&recv, job);
    });
    let bytes = job.size * job.parts * job.messages;
    println!("{:.3}", bytes as f64 / start.elapsed().as_secs_f64() / 1e6);
}

fn receiving(recv: &RecvComm, job: &Job) {
    let target = memory(job, AHEAD, |memory| recv.register(memory));
    let mut flying = std::collections::VecDeque::new();
    for group in 0..job.messages + AHEAD {
        if flying.len() == AHEAD || group >= job.messages {
            let oldest: Request = flying.pop_front().expect("a group in flight");
            let sizes = loop {
                if let Some(sizes) = recv.test(&oldest).expect("a receive") {
                    break sizes;
                }
            };
            // A plugin may tell of a group no more than which parts have data.
            assert!(sizes.iter().all(|size| *size != 0 || job.size == 0), "{:?}", &*sizes);
        }
        if group < job.messages {
            // SAFETY: the memory is left alone until the group is over.
            flying.push_back(unsafe { recv.post(&parts_of(&target, job, group)) }.expect("irecv"));
        }
    }
}

fn sending(send: &SendComm, job: &Job) {
    let source = memory(job, AHEAD, |memory| send.register(memory));
    let mut flying = std::collections::VecDeque::new();
    for group in 0..job.messages + AHEAD {
        if flying.len() == AHEAD || group >= job.messages {
            let oldest: Vec<Request> = flying.pop_front().expect("a group in flight");
            oldest.iter().for_each(|request| while send.test(request).expect("a send").is_none() {});
        }
        if group < job.messages {
            // SAFETY: the memory is left alone until the group is over.
            let post = |part| unsafe { send.post(part) }.expect("isend");
            flying.push_back(parts_of(&source, job, group).into_iter().map(post).collect());
        }
    }
}

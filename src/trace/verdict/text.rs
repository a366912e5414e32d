//! The verdict as sentences: every rank with its host and process, every duration.

use std::fmt::Write;

use super::{Arguments, Call, Cause, Communicator, Key, Member, On, Verdict, Wait};
use crate::trace::names::Name;

/// More ranks than this are not listed one by one.
const LISTED: usize = 8;

impl Communicator {
    /// The verdict as a sentence, without the communicator's name.
    pub(crate) fn explain(&self, verdict: &Verdict) -> String {
        let mut text = String::new();
        if let Some(waiting) = &verdict.waiting {
            let have = if waiting.ranks.len() == 1 { "has" } else { "have" };
            let _ = write!(
                text,
                "{} {have} been in {} for {}",
                ranks(&waiting.ranks),
                call(waiting.key),
                seconds(waiting.for_ns)
            );
            text += "; ";
        }
        text += &self.cause(&verdict.cause);
        if !verdict.unseen.is_empty() {
            let _ = write!(text, " (nothing is known of {})", ranks(&verdict.unseen));
        }
        text
    }

    fn cause(&self, cause: &Cause) -> String {
        let list = |parts: Vec<String>| parts.join("; ");
        match cause {
            Cause::Exited(exited) => list(
                exited
                    .iter()
                    .map(|&(rank, ago)| format!("the process of {} has ended, {} ago", self.place(rank), seconds(ago)))
                    .collect(),
            ),
            Cause::Silent(silent) => list(
                silent
                    .iter()
                    .map(|&(rank, silence)| {
                        format!(
                            "{} has given no sign of life for {}: it was stopped or killed, its host is gone, or it \
                             gets no processor",
                            self.place(rank),
                            seconds(silence)
                        )
                    })
                    .collect(),
            ),
            Cause::Behind(behind) => list(behind.iter().map(|(rank, last)| self.behind(*rank, *last)).collect()),
            Cause::Elsewhere(others) => list(
                others
                    .iter()
                    .map(|(rank, own)| {
                        format!(
                            "{} is in {} instead, for {}: the ranks do not make the same calls in the same order",
                            self.place(*rank),
                            call(own.key),
                            seconds(self.now.saturating_sub(own.entered))
                        )
                    })
                    .collect(),
            ),
            Cause::Order { ranks, key, made } => self.order(ranks, *key, *made),
            Cause::Arguments(others, most) => list(
                others
                    .iter()
                    .map(|(rank, own)| {
                        format!(
                            "{} called it with {}, the others with {} (the reduction operator is not in NCCL's \
                             profiler events)",
                            self.place(*rank),
                            arguments(*own),
                            arguments(*most)
                        )
                    })
                    .collect(),
            ),
            Cause::Chain(chain, end) => self.chain(chain, *end),
            Cause::Unknown if self.ranks == 0 => "what it waits for is not known here".into(),
            Cause::Unknown => "all ranks have entered it with the same arguments, and no wait of a transfer is \
                               known: a kernel that does not run, or a path inside a host"
                .into(),
        }
    }

    fn order(&self, ranks: &[i32], key: Key, made: bool) -> String {
        let places: Vec<String> = ranks.iter().map(|&rank| self.place(rank)).collect();
        let (places, key) = (places.join(" and "), call(key));
        if made {
            format!("{places} called {key} before it, and the others did not: the ranks do not make the same calls")
        } else {
            format!("{places} did not call {key} before it, and the others did: the ranks do not make the same calls")
        }
    }

    fn behind(&self, rank: i32, last: Option<Call>) -> String {
        let place = self.place(rank);
        let member = self.members.get(&rank);
        if member.is_some_and(|member| member.left) {
            return format!("{place} has left the communicator");
        }
        let last = match last {
            None => "it has made no call on this communicator".to_owned(),
            Some(last) if last.open => format!("it is still in {}", call(last.key)),
            Some(last) => {
                let ago = seconds(self.now.saturating_sub(last.entered));
                format!("its last call was {}, {ago} ago, completed", call(last.key))
            }
        };
        match member.and_then(|member| member.elsewhere.as_ref()) {
            Some(elsewhere) => format!("{place} has not entered it: {last}; it waits in {elsewhere}"),
            None => format!("{place} has not entered it: {last}"),
        }
    }

    fn chain(&self, chain: &[i32], end: Option<Wait>) -> String {
        let mut text = String::new();
        for pair in chain.windows(2) {
            let _ = write!(text, "rank {} waits for rank {}; ", pair[0], pair[1]);
        }
        let Some(&last) = chain.last() else { return text };
        match end {
            Some(wait) if wait.on == On::Network => {
                let _ = write!(
                    text,
                    "a send of {} to {}{} has been under way for {}{}",
                    self.place(last),
                    self.place(wait.peer),
                    self.over(last, wait.peer),
                    seconds(self.now.saturating_sub(wait.since)),
                    // Where the other ranks are not known, one that has not entered the call may be the cause.
                    if self.ranks == 0 { "" } else { ": look at the network between them" }
                );
            }
            Some(wait) => {
                let _ = write!(
                    text,
                    "{} has waited for its own GPU for {}",
                    self.place(last),
                    seconds(self.now.saturating_sub(wait.since))
                );
            }
            None if chain[..chain.len() - 1].contains(&last) => {
                text += "which is a circle: the ranks wait for each other";
            }
            None => {
                let _ = write!(text, "of {} no wait is known", self.place(last));
            }
        }
        text
    }

    /// The interface by which a rank sends to another, as far as that is known: where nothing is known of the other, the one
    /// by which all of its sends go.
    fn over(&self, from: i32, to: i32) -> String {
        let Some(from) = self.members.get(&from) else { return String::new() };
        let route = match self.members.get(&to) {
            Some(there) => from.routes.iter().filter(|route| route.leads_to(to, there)).min_by_key(|route| route.moved),
            None => {
                let mut sends = from.routes.iter().filter(|route| route.send);
                sends.next().filter(|first| sends.all(|route| route.interfaces == first.interfaces))
            }
        };
        route.map_or_else(String::new, |route| format!(" over {}", route.interfaces.join(" and ")))
    }

    /// A rank with its host, process and GPU, and its rank in the job where that is another one.
    fn place(&self, rank: i32) -> String {
        let Some(Member { host, pid, gpu, global, .. }) = self.members.get(&rank) else {
            return format!("rank {rank}");
        };
        let mut text = format!("rank {rank} ({host}, process {pid}");
        if !gpu.is_empty() {
            let _ = write!(text, ", GPU {gpu}");
        }
        if let Some(global) = global.filter(|&global| global != rank) {
            let _ = write!(text, ", global rank {global}");
        }
        text + ")"
    }
}

/// `AllReduce #93`.
pub(crate) fn call(key: Key) -> String {
    format!("{} #{}", key.func.text(), key.seq)
}

fn arguments(arguments: Arguments) -> String {
    let Arguments { count, datatype, root } = arguments;
    let datatype = if datatype == Name::NONE { "elements" } else { datatype.text() };
    format!("{count} {datatype}, root {root}")
}

fn ranks(ranks: &[i32]) -> String {
    let listed: Vec<String> = ranks.iter().take(LISTED).map(i32::to_string).collect();
    match (ranks.len(), listed.split_last()) {
        (1, _) => format!("rank {}", ranks[0]),
        (count, _) if count > LISTED => format!("ranks {} and {} more", listed.join(", "), count - LISTED),
        (_, Some((last, first))) => format!("ranks {} and {last}", first.join(", ")),
        _ => "no rank".into(),
    }
}

/// A duration for users.
pub(crate) fn seconds(ns: u64) -> String {
    match ns / 1_000_000_000 {
        0..10 => format!("{:.1} s", ns as f64 / 1e9),
        whole @ 10..600 => format!("{whole} s"),
        whole => format!("{} min", whole / 60),
    }
}

//! The verdict as sentences: every rank with its host and process, every duration.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::Write;

use super::{
    Absent, Arguments, Call, Cause, Communicator, Hold, Key, Made, Member, On, Route, Undelivered, Verdict, Wait,
    Waiting, odd,
};
use crate::trace::names::Name;

/// More ranks than this are not listed one by one.
const LISTED: usize = 8;

/// A connection that has carried nothing for a shorter time is at work.
const AT_WORK_NS: u64 = 1_000_000_000;

impl Communicator {
    /// The verdict as a sentence, without the communicator's name.
    pub(crate) fn explain(&self, verdict: &Verdict) -> String {
        let mut text = String::new();
        if let Some(waiting) = &verdict.waiting {
            let waits = match waiting.ranks[..] {
                [rank] => format!("{} has", self.place(rank)),
                _ => format!("{} have", self.ranks(&waiting.ranks)),
            };
            let on = self.waiting_on(waiting).map_or_else(String::new, |on| format!(", waiting for {}", on.what()));
            let _ = write!(text, "{waits} been in {} for {}{on}; ", call(waiting.key), seconds(waiting.for_ns));
        }
        text += &self.cause(verdict);
        if !verdict.unseen.is_empty() && !matches!(verdict.cause, Cause::Lost(_)) {
            let _ = write!(text, " (nothing is known of {})", self.ranks(&verdict.unseen));
        }
        if !verdict.gaps.is_empty() {
            let _ = write!(
                text,
                " (the record of {} has gaps: events found no room, so it may say too little of what was entered, ended \
                 and waited for)",
                self.places(&verdict.gaps)
            );
        }
        text
    }

    fn cause(&self, verdict: &Verdict) -> String {
        let each = |ranks: &[(i32, u64)], text: &dyn Fn(String, String) -> String| {
            let all = ranks.iter().map(|&(rank, ns)| text(self.whole_place(rank), seconds(ns)));
            all.collect::<Vec<_>>().join("; ")
        };
        match &verdict.cause {
            Cause::Exited(ranks) => each(ranks, &|place, ago| format!("the process of {place} has ended, {ago} ago")),
            Cause::Silent(ranks) => each(ranks, &|place, silence| {
                format!(
                    "{place} has given no sign of life for {silence}: it was stopped or killed, its host is gone, or it \
                     gets no processor"
                )
            }),
            Cause::Lost(ranks) => {
                let silence = match ranks[..] {
                    [_] => "does not answer: it was stopped or killed, or gets no processor",
                    _ => "do not answer: they were stopped or killed, or get no processor",
                };
                format!("{} {silence}", self.places(ranks))
            }
            Cause::Behind(all) => {
                let waited = verdict.waiting.as_ref().map(|waiting| waiting.key);
                all.iter().map(|absent| self.behind(absent, waited)).collect::<Vec<_>>().join("; ")
            }
            Cause::Elsewhere { ranks, others } => self.elsewhere(ranks, others, verdict),
            Cause::Order { key, made, lack } => self.order(*key, made, lack),
            Cause::Arguments(groups) => self.arguments(groups),
            Cause::Chain(chain, end) => self.chain(chain, *end),
            Cause::Undelivered(chain, bytes) => self.undelivered(chain, bytes),
            Cause::Deadlock(holds) => deadlock(holds),
            Cause::Unknown if self.ranks == 0 => "what it waits for is not known here".into(),
            Cause::Unknown if !verdict.gaps.is_empty() || !verdict.unseen.is_empty() => {
                "what it waits for is not known".into()
            }
            Cause::Unknown => "all ranks have entered it with the same arguments, and no wait of a transfer is \
                               known: a kernel that does not run, or a path inside a host"
                .into(),
        }
    }

    fn elsewhere(&self, all: &[(i32, Call)], others: &[i32], verdict: &Verdict) -> String {
        let mut parts: Vec<String> = all
            .iter()
            .map(|(rank, own)| {
                let since = seconds(self.now.saturating_sub(own.entered));
                format!("{} is in {} instead, for {since}", self.whole_place(*rank), call(own.key))
            })
            .collect();
        if let Some(waiting) = verdict.waiting.as_ref().filter(|_| !others.is_empty()) {
            parts.push(format!("{} in {}", self.places(others), call(waiting.key)));
        }
        parts.join("; ") + ": the ranks do not make the same calls in the same order"
    }

    fn order(&self, key: Key, made: &[i32], lack: &[i32]) -> String {
        let key = call(key);
        let text = match (made.len(), lack.len()) {
            (made_by, lacked_by) if made_by > lacked_by => {
                format!("{} did not call {key} before it, and the others did", self.places(lack))
            }
            (made_by, lacked_by) if made_by < lacked_by => {
                format!("{} called {key} before it, and the others did not", self.places(made))
            }
            _ => format!("{} called {key} before it, and {} did not", self.places(made), self.places(lack)),
        };
        text + ": the ranks do not make the same calls"
    }

    fn arguments(&self, groups: &[Made]) -> String {
        let odd = odd(groups.iter().map(|it| &it.ranks));
        let is_odd = |group: &&Made| group.ranks.iter().any(|rank| odd.contains(rank));
        let of = |Made { key, arguments, ranks }: &Made| {
            format!("{} called {} with {}", self.places(ranks), call(*key), with(*key, *arguments))
        };
        let parts: Vec<String> = groups.iter().filter(is_odd).map(of).collect();
        let end = match groups.first().filter(|most| !is_odd(most)) {
            Some(most) => format!(", the others with {}", with(most.key, most.arguments)),
            None => ": they differ".into(),
        };
        let is_transfer = groups.first().is_some_and(|it| it.key.peer.is_some());
        let remark = if is_transfer { "" } else { " (the reduction operator is not in NCCL's profiler events)" };
        format!("{}{end}{remark}", parts.join("; "))
    }

    fn behind(&self, absent: &Absent, waited: Option<Key>) -> String {
        let Absent { rank, lacks, last } = absent;
        let place = self.whole_place(*rank);
        if self.members.get(rank).is_some_and(|member| member.left) {
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
        match lacks.peer {
            Some(_) => format!("{place} has not called the matching {}: {last}", call(*lacks)),
            None if waited == Some(*lacks) => format!("{place} has not entered it: {last}"),
            None => format!("{place} has not entered {}: {last}", call(*lacks)),
        }
    }

    fn waits(&self, chain: &[i32]) -> String {
        let wait = |pair: &[i32]| format!("{} waits for {}; ", self.ranks(&pair[..1]), self.ranks(&pair[1..]));
        chain.windows(2).map(wait).collect()
    }

    fn undelivered(&self, chain: &[i32], bytes: &Undelivered) -> String {
        let &[.., receiver, sender] = chain else { return String::new() };
        format!(
            "{}{} sent bytes to {}{} that rank {receiver} has not taken for {}: look at the network between them, or at rank \
             {receiver}",
            self.waits(chain),
            self.place(sender),
            self.place(receiver),
            over(&bytes.interfaces),
            seconds(self.now.saturating_sub(bytes.since))
        )
    }

    fn chain(&self, chain: &[i32], end: Option<Wait>) -> String {
        let mut text = self.waits(chain);
        let Some(&last) = chain.last() else { return text };
        if self.ranks == 0 && end.is_none() && !self.members.contains_key(&last) {
            // A process that is not told of others.
            let over = chain.first().map_or_else(String::new, |&own| self.over(own, last, false));
            return format!("{}{over}", text.trim_end_matches("; "));
        }
        match end {
            Some(wait) if wait.on == On::Network => {
                let _ = write!(
                    text,
                    "a send of {} to {}{} has been under way for {}{}{}",
                    self.place(last),
                    self.place(wait.peer),
                    self.over(last, wait.peer, true),
                    seconds(self.now.saturating_sub(wait.since)),
                    self.idle(last, wait.peer),
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

    /// The connection by which a rank sends to another or receives from it, as far as that is known. Where nothing is
    /// known of the other, it is the first, if all of that direction have the same interfaces.
    pub(super) fn route(&self, own: i32, other: i32, send: bool) -> Option<&Route> {
        let own = self.members.get(&own)?;
        let mut routes = own.routes.iter().filter(|route| route.send == send);
        match self.members.get(&other) {
            Some(there) => routes.filter(|route| route.leads_to(other, there)).min_by_key(|route| route.moved),
            None => routes.next().filter(|first| routes.all(|route| route.interfaces == first.interfaces)),
        }
    }

    fn over(&self, own: i32, other: i32, send: bool) -> String {
        self.route(own, other, send).map_or_else(String::new, |route| over(&route.interfaces))
    }

    /// For how long nothing has moved over the connection by which a rank sends to another.
    fn idle(&self, own: i32, other: i32) -> String {
        let idle = self.route(own, other, true).map_or(0, |route| self.now.saturating_sub(route.moved));
        if idle < AT_WORK_NS { String::new() } else { format!(", nothing has moved over it for {}", seconds(idle)) }
    }

    /// The reason for which most of the ranks in a call wait; a GPU may wait only because data is missing.
    pub(crate) fn waiting_on(&self, waiting: &Waiting) -> Option<On> {
        let members = waiting.ranks.iter().filter_map(|rank| self.members.get(rank));
        let mut counts: BTreeMap<On, usize> = BTreeMap::new();
        for on in members.filter_map(|member| member.waits.iter().map(|wait| wait.on).min()) {
            *counts.entry(on).or_default() += 1;
        }
        counts.into_iter().max_by_key(|&(on, count)| (count, Reverse(on))).map(|(on, _)| on)
    }

    /// Ranks in few words: those of a host together, with their GPUs, and their ranks in the job where these are
    /// others.
    pub(super) fn ranks(&self, ranks: &[i32]) -> String {
        let mut hosts: Vec<(Option<&str>, Vec<i32>)> = Vec::new();
        for &rank in ranks.iter().take(LISTED) {
            let host = self.members.get(&rank).map(|member| member.host.as_str());
            match hosts.iter_mut().find(|(known, _)| *known == host) {
                Some((_, own)) => own.push(rank),
                None => hosts.push((host, vec![rank])),
            }
        }
        let of_host = |(host, own): &(Option<&str>, Vec<i32>)| {
            let numbers = |all: &[i32]| list(&all.iter().map(i32::to_string).collect::<Vec<_>>());
            let Some(host) = host else { return numbers(own) };
            let global = |rank: &i32| self.members.get(rank)?.global;
            let global: Option<Vec<i32>> = own.iter().map(global).collect();
            let global = global.filter(|global| global != own).unwrap_or_default();
            let global: Vec<String> = global.iter().map(i32::to_string).collect();
            let gpus = own.iter().filter_map(|rank| self.members.get(rank)).map(|member| member.gpu.clone());
            let gpus: Vec<String> = gpus.filter(|gpu| !gpu.is_empty()).collect();
            format!("{} ({host}{}{})", numbers(own), counted("GPU", &gpus), counted("global rank", &global))
        };
        let mut parts: Vec<String> = hosts.iter().map(of_host).collect();
        if ranks.len() > LISTED {
            parts.push(format!("{} more", ranks.len() - LISTED));
        }
        format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, list(&parts))
    }

    fn place(&self, rank: i32) -> String {
        place(rank, self.member(rank), false)
    }

    /// The same with its interfaces, for a rank that holds others up.
    fn whole_place(&self, rank: i32) -> String {
        place(rank, self.member(rank), true)
    }

    fn places(&self, ranks: &[i32]) -> String {
        let mut all: Vec<String> = ranks.iter().take(LISTED).map(|&rank| self.place(rank)).collect();
        if ranks.len() > LISTED {
            all.push(format!("{} more", ranks.len() - LISTED));
        }
        all.join(" and ")
    }
}

/// `, GPUs a and b`.
fn counted(noun: &str, all: &[String]) -> String {
    match all {
        [] => String::new(),
        [one] => format!(", {noun} {one}"),
        _ => format!(", {noun}s {}", list(all)),
    }
}

/// A rank with its host, process and GPU, perhaps its interfaces, and its rank in the job where that is another one.
fn place(rank: i32, member: Option<&Member>, interfaces: bool) -> String {
    let Some(member @ Member { host, pid, gpu, global, .. }) = member else { return format!("rank {rank}") };
    let mut text = format!("rank {rank} ({host}, process {pid}");
    if !gpu.is_empty() {
        let _ = write!(text, ", GPU {gpu}");
    }
    if let Some(global) = global.filter(|&global| global != rank) {
        let _ = write!(text, ", global rank {global}");
    }
    if interfaces {
        text += &counted("interface", &member.interfaces());
    }
    text + ")"
}

fn over(interfaces: &[String]) -> String {
    if interfaces.is_empty() { String::new() } else { format!(" over {}", interfaces.join(" and ")) }
}

fn deadlock(holds: &[Hold]) -> String {
    let of = |Hold { rank, member, holds, is_in, is_in_both }: &Hold| {
        let place = place(*rank, Some(member), true);
        match is_in_both {
            true => format!("{place} entered {is_in} before {holds}"),
            false => format!("{place} is in {is_in} and has not entered {holds}"),
        }
    };
    let all: Vec<String> = holds.iter().map(of).collect();
    format!("{}: a deadlock, the ranks wait for each other", all.join("; "))
}

/// `AllReduce #93`.
pub(crate) fn call(key: Key) -> String {
    let (func, Key { seq, peer, .. }) = (key.func.text(), key);
    match peer {
        None => format!("{func} #{seq}"),
        Some(peer) => format!("{func} #{seq} {} rank {peer}", if key.is_send() { "to" } else { "from" }),
    }
}

fn with(key: Key, arguments: Arguments) -> String {
    let Arguments { count, datatype, root } = arguments;
    let datatype = if datatype == Name::NONE { "elements" } else { datatype.text() };
    if key.peer.is_some() { format!("{count} {datatype}") } else { format!("{count} {datatype}, root {root}") }
}

/// `a, b and c`.
fn list(all: &[String]) -> String {
    match all.split_last() {
        Some((last, first)) if !first.is_empty() => format!("{} and {last}", first.join(", ")),
        _ => all.concat(),
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

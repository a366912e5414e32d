//! The form of each type of value, and how it is read.
//!
//! A type describes its form in words ([`Value::kind`]) and parses text; on failure it offers the nearest valid text if
//! there is a sensible one. Surrounding white space and the letter case of fixed words are ignored.

use super::nearest::nearest;
use std::time::Duration;

/// Why a text is not a value of its type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bad {
    /// What was expected.
    pub expected: String,
    /// The nearest valid text, when one can be named.
    pub nearest: Option<String>,
}

/// A type that a variable may have.
pub(crate) trait Value: Sized {
    /// The form of a value in words, as in "0 or 1".
    fn kind() -> String;

    /// Reads `text`. An empty text is what an unset variable would give, where the type has such a state.
    ///
    /// # Errors
    /// What was expected and, if possible, the nearest valid text.
    fn parse(text: &str) -> Result<Self, Bad>;

    /// Reads the text of a variable that is set. Only a type for which "set to nothing" differs from "unset" has its
    /// own.
    ///
    /// # Errors
    /// As [`Value::parse`].
    fn given(text: &str) -> Result<Self, Bad> {
        Self::parse(text)
    }
}

/// `TOWLINE_RAILS`: how interfaces are put together into devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Rails {
    /// One interface for each device.
    Single,
    /// One device that spreads over all chosen interfaces.
    All,
    /// One device that spreads over the interfaces of these names.
    List(Vec<String>),
}

/// `NCCL_SOCKET_FAMILY`: the address family that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    /// AF_INET.
    V4,
    /// AF_INET6.
    V6,
}

/// `TOWLINE_BACKEND`: which network carries the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Backend {
    /// RDMA where there is a usable port, else TCP.
    Auto,
    /// Sockets.
    Tcp,
    /// RoCE and InfiniBand.
    Rdma,
}

/// What the transport reports to NCCL's profiler about transfers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NetEvents {
    /// Events, if the running NCCL tolerates them; with details when this library's own profiler reads them.
    Auto,
    /// Nothing.
    Off,
    /// Events as NCCL's own transports emit them.
    Nccl,
    /// Events with details, under Towline's own identifier.
    Towline,
}

/// A whole number from `LEAST` to `MOST`. Hexadecimal with `0x` is understood, as NCCL does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Number<const LEAST: i64, const MOST: i64>(pub i64);

/// How much is logged: each level includes those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum LogLevel {
    /// Nothing.
    Off,
    /// Failures.
    Error,
    /// Problems that the user should check.
    Warn,
    /// What was chosen and why.
    Info,
    /// Events of each connection.
    Debug,
    /// Events of each message.
    Trace,
}

/// Reads one of a few fixed words.
fn word<T: Copy>(text: &str, words: &[(&str, T)]) -> Result<T, Bad> {
    let text = text.trim();
    if let Some((_, value)) = words.iter().find(|(word, _)| word.eq_ignore_ascii_case(text)) {
        return Ok(*value);
    }
    let valid: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
    Err(Bad { expected: one_of(&valid), nearest: nearest(text, valid.iter().copied()).map(str::to_owned) })
}

fn one_of(words: &[&str]) -> String {
    match words {
        [first, second] => format!("{first} or {second}"),
        _ => format!("one of {}", words.join(", ")),
    }
}

impl Value for bool {
    fn kind() -> String {
        "0 or 1".to_owned()
    }

    fn parse(text: &str) -> Result<Self, Bad> {
        const WORDS: &[(&str, bool)] =
            &[("1", true), ("0", false), ("true", true), ("false", false), ("yes", true), ("no", false)];
        const MORE: &[(&str, bool)] = &[("on", true), ("off", false)];
        word(text, MORE).or_else(|_| word(text, WORDS)).map_err(|bad| {
            // For a word that is nearly a yes or a no, the suggestion is the digit that the documentation uses.
            let digit = bad.nearest.and_then(|near| word(&near, WORDS).ok()).map(|on| u8::from(on).to_string());
            Bad { expected: Self::kind(), nearest: digit }
        })
    }
}

impl Value for Option<bool> {
    fn kind() -> String {
        bool::kind()
    }

    fn parse(text: &str) -> Result<Self, Bad> {
        if text.is_empty() { Ok(None) } else { bool::parse(text).map(Some) }
    }
}

const FAMILIES: &[(&str, Family)] = &[("AF_INET", Family::V4), ("AF_INET6", Family::V6)];

impl Value for Option<Family> {
    fn kind() -> String {
        "AF_INET or AF_INET6".to_owned()
    }

    fn parse(text: &str) -> Result<Self, Bad> {
        const MEANT: &[(&str, &str)] = &[
            ("4", "AF_INET"),
            ("6", "AF_INET6"),
            ("v4", "AF_INET"),
            ("v6", "AF_INET6"),
            ("ipv4", "AF_INET"),
            ("ipv6", "AF_INET6"),
            ("inet", "AF_INET"),
            ("inet6", "AF_INET6"),
        ];
        if text.is_empty() {
            return Ok(None);
        }
        let near = word(text, MEANT).ok().map(str::to_owned);
        word(text, FAMILIES).map(Some).map_err(|bad| Bad { nearest: near.or(bad.nearest), ..bad })
    }
}

const LEVELS: &[(&str, LogLevel)] = &[
    ("off", LogLevel::Off),
    ("error", LogLevel::Error),
    ("warn", LogLevel::Warn),
    ("info", LogLevel::Info),
    ("debug", LogLevel::Debug),
    ("trace", LogLevel::Trace),
];

impl Value for LogLevel {
    fn kind() -> String {
        one_of(&LEVELS.iter().map(|(word, _)| *word).collect::<Vec<_>>())
    }

    fn parse(text: &str) -> Result<Self, Bad> {
        word(text, LEVELS)
    }
}

const BACKENDS: &[(&str, Backend)] = &[("auto", Backend::Auto), ("tcp", Backend::Tcp), ("rdma", Backend::Rdma)];

impl Value for Backend {
    fn kind() -> String {
        one_of(&BACKENDS.iter().map(|(word, _)| *word).collect::<Vec<_>>())
    }

    fn parse(text: &str) -> Result<Self, Bad> {
        word(text, BACKENDS)
    }
}

const NET_EVENTS: &[(&str, NetEvents)] =
    &[("auto", NetEvents::Auto), ("off", NetEvents::Off), ("nccl", NetEvents::Nccl), ("towline", NetEvents::Towline)];

impl Value for NetEvents {
    fn kind() -> String {
        one_of(&NET_EVENTS.iter().map(|(word, _)| *word).collect::<Vec<_>>())
    }

    fn parse(text: &str) -> Result<Self, Bad> {
        word(text, NET_EVENTS)
    }
}

impl<const LEAST: i64, const MOST: i64> Value for Number<LEAST, MOST> {
    fn kind() -> String {
        if MOST == i64::MAX {
            format!("a whole number, {LEAST} or more")
        } else {
            format!("a whole number from {LEAST} to {MOST}")
        }
    }

    fn parse(text: &str) -> Result<Self, Bad> {
        let text = text.trim();
        let number = match text.strip_prefix("0x") {
            Some(digits) => i128::from_str_radix(digits, 16).ok(),
            None => text.parse().ok(),
        };
        let near = number.map(|number: i128| number.clamp(i128::from(LEAST), i128::from(MOST)));
        match (number, near.and_then(|near| i64::try_from(near).ok())) {
            (Some(number), Some(near)) if number == i128::from(near) => Ok(Self(near)),
            (_, near) => Err(Bad { expected: Self::kind(), nearest: near.map(|near| near.to_string()) }),
        }
    }
}

/// What users put around names and lists by mistake.
pub(crate) fn is_blank_or_quote(c: char) -> bool {
    c.is_whitespace() || matches!(c, '"' | '\'')
}

impl Value for Rails {
    fn kind() -> String {
        "unset, `all`, or a comma-separated list of interface names".to_owned()
    }

    fn parse(text: &str) -> Result<Self, Bad> {
        let names: Vec<String> = text.split(',').map(|name| name.trim_matches(is_blank_or_quote).to_owned()).collect();
        if let Some(bad) = other_grammar(&names) {
            return Err(bad);
        }
        match names.as_slice() {
            [only] if only.is_empty() => Ok(Self::Single),
            [only] if only.eq_ignore_ascii_case("all") => Ok(Self::All),
            _ => {
                let mut kept: Vec<String> = Vec::new();
                for name in names {
                    if !name.is_empty() && !kept.contains(&name) {
                        kept.push(name);
                    }
                }
                if kept.is_empty() { Err(Bad { expected: Self::kind(), nearest: None }) } else { Ok(Self::List(kept)) }
            }
        }
    }
}

/// The complaint about a list in the syntax of another variable or program.
fn other_grammar(names: &[String]) -> Option<Bad> {
    let expected = |more: &str| format!("{}{more}", Rails::kind());
    if names.iter().any(|name| name.starts_with('^')) {
        let more = "; to leave interfaces out, set TOWLINE_RAILS=all and NCCL_SOCKET_IFNAME=^NAMES";
        return Some(Bad { expected: expected(more), nearest: Some("all".to_owned()) });
    }
    if names.iter().any(|name| name == "*") {
        return Some(Bad { expected: expected(""), nearest: Some("all".to_owned()) });
    }
    if names.iter().any(|name| name.parse::<std::net::IpAddr>().is_ok()) {
        return Some(Bad { expected: expected(", and not addresses"), nearest: None });
    }
    let is_separator = |c: char| c.is_whitespace() || c == ';';
    names.iter().any(|name| name.starts_with('=') || name.contains(is_separator)).then(|| {
        let pieces = names.iter().flat_map(|name| name.trim_start_matches('=').split(is_separator));
        let list: Vec<&str> = pieces.filter(|piece| !piece.is_empty()).collect();
        Bad { expected: expected(""), nearest: (!list.is_empty()).then(|| list.join(",")) }
    })
}

/// `TOWLINE_KEY_FILE`: a path. The path is empty when the variable is set to nothing: the user wanted encryption and
/// must not get an unencrypted connection because a script left the name out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KeyFile(pub String);

impl Value for Option<KeyFile> {
    fn kind() -> String {
        "text".to_owned()
    }

    fn parse(text: &str) -> Result<Self, Bad> {
        Ok(Option::<String>::parse(text)?.map(KeyFile))
    }

    fn given(text: &str) -> Result<Self, Bad> {
        Ok(Some(KeyFile(text.trim().to_owned())))
    }
}

/// A name or a list that is used unchanged. Empty is unset.
impl Value for Option<String> {
    fn kind() -> String {
        "text".to_owned()
    }

    fn parse(text: &str) -> Result<Self, Bad> {
        let text = text.trim();
        Ok((!text.is_empty()).then(|| text.to_owned()))
    }
}

/// Reads `auto` or a whole number from 1 to `most`.
fn auto_or_number(text: &str, most: u64) -> Result<Option<u64>, Bad> {
    let text = text.trim();
    if text.is_empty() || text.eq_ignore_ascii_case("auto") {
        return Ok(None);
    }
    match text.parse::<i128>() {
        Ok(number) if (1..=i128::from(most)).contains(&number) => {
            Ok(Some(u64::try_from(number).expect("the range was checked")))
        }
        Ok(number) => {
            let nearest = number.clamp(1, i128::from(most)).to_string();
            Err(Bad { expected: auto_kind(most), nearest: Some(nearest) })
        }
        Err(_) => {
            let nearest = nearest(text, ["auto"]).map(str::to_owned);
            Err(Bad { expected: auto_kind(most), nearest })
        }
    }
}

fn auto_kind(most: u64) -> String {
    format!("`auto` or a whole number from 1 to {most}")
}

/// Far above what any machine can use: it only keeps a typing error from exhausting the process.
const MOST_STREAMS_OR_WORKERS: u64 = 1024;

impl Value for Option<usize> {
    fn kind() -> String {
        auto_kind(MOST_STREAMS_OR_WORKERS)
    }

    fn parse(text: &str) -> Result<Self, Bad> {
        let number = auto_or_number(text, MOST_STREAMS_OR_WORKERS)?;
        Ok(number.map(|number| usize::try_from(number).expect("bounded by 1024")))
    }
}

/// 10 Tbit/s in Mbit/s: the speed field of NCCL's properties is an int, and no interface comes near.
const MOST_MBPS: u64 = 10_000_000;

impl Value for Option<u32> {
    fn kind() -> String {
        auto_kind(MOST_MBPS)
    }

    fn parse(text: &str) -> Result<Self, Bad> {
        let number = auto_or_number(text, MOST_MBPS)?;
        Ok(number.map(|number| u32::try_from(number).expect("bounded by ten million")))
    }
}

/// A day: a longer deadline is a mistake, and arithmetic on it could overflow.
const MOST_SECONDS: f64 = 86_400.0;
/// A millisecond: timers are no finer.
const LEAST_SECONDS: f64 = 0.001;

impl Value for Duration {
    fn kind() -> String {
        format!("seconds from {LEAST_SECONDS} to {MOST_SECONDS}")
    }

    fn parse(text: &str) -> Result<Self, Bad> {
        let text = text.trim();
        // Many programs accept "5s", so it is accepted here.
        let digits = text.strip_suffix('s').unwrap_or(text);
        match digits.parse::<f64>() {
            Ok(seconds) if (LEAST_SECONDS..=MOST_SECONDS).contains(&seconds) => Ok(Self::from_secs_f64(seconds)),
            Ok(seconds) if !seconds.is_nan() => {
                let nearest = seconds.clamp(LEAST_SECONDS, MOST_SECONDS).to_string();
                Err(Bad { expected: Self::kind(), nearest: Some(nearest) })
            }
            _ => Err(Bad { expected: Self::kind(), nearest: None }),
        }
    }
}

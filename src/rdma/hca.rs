//! `NCCL_IB_HCA`: which devices and ports may be used.
//!
//! The value is a comma-separated list of `name[:port[:rail[:plane]]]`. A name is a prefix of the device's name; with
//! `=` before the whole list it is the exact name, and with `^` (before `=`) the list excludes instead. Without a port
//! all ports are meant. An empty list means every device, so `^` alone excludes all, as in NCCL.
//!
//! This module must not depend on which devices exist.

use std::fmt;

/// NCCL's value for a rail or plane that is not set.
pub(crate) const UNKNOWN_ID: i16 = -1;

/// A parsed `NCCL_IB_HCA`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct HcaFilter {
    excludes: bool,
    is_exact: bool,
    entries: Vec<Entry>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    name: String,
    port: Option<i64>,
    rail: i16,
    plane: i16,
}

/// The list's settings for a port that it chose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Choice {
    /// The rail's number, −1 for none.
    pub rail: i16,
    /// The plane's number, −1 for none.
    pub plane: i16,
}

impl HcaFilter {
    /// Reads the variable's value; unset is the empty text.
    pub(crate) fn parse(text: &str) -> Self {
        let (excludes, text) = strip(text, '^');
        let (is_exact, text) = strip(text, '=');
        let entries = text.split(',').filter_map(Entry::parse).collect();
        Self { excludes, is_exact, entries }
    }

    /// Whether a port may be used, and the list's settings for it.
    pub(crate) fn choose(&self, device: &str, port: u8) -> Option<Choice> {
        let named = self.entries.iter().find(|entry| entry.names(self.is_exact, device, port));
        let is_listed = self.entries.is_empty() || named.is_some();
        (is_listed != self.excludes).then(|| {
            named.map_or(Choice { rail: UNKNOWN_ID, plane: UNKNOWN_ID }, |entry| Choice {
                rail: entry.rail,
                plane: entry.plane,
            })
        })
    }

    /// The entries that match none of these ports: mostly typing errors.
    pub(crate) fn unmatched<'a>(&self, ports: impl Iterator<Item = (&'a str, u8)> + Clone) -> Vec<String> {
        let is_missing = |entry: &&Entry| !ports.clone().any(|(device, port)| entry.names(self.is_exact, device, port));
        self.entries.iter().filter(is_missing).map(ToString::to_string).collect()
    }
}

fn strip(text: &str, mark: char) -> (bool, &str) {
    text.strip_prefix(mark).map_or((false, text), |rest| (true, rest))
}

impl Entry {
    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split(':');
        let name = parts.next().filter(|name| !name.is_empty())?.to_owned();
        let mut number = || parts.next().filter(|part| !part.is_empty()).map(number_at_front);
        let port = number();
        let mut id = || number().and_then(|id| i16::try_from(id).ok()).unwrap_or(UNKNOWN_ID);
        let (rail, plane) = (id(), id());
        // Minus one is NCCL's "any port".
        Some(Self { name, port: port.filter(|port| *port != -1), rail, plane })
    }

    fn names(&self, is_exact: bool, device: &str, port: u8) -> bool {
        let is_named = if is_exact { device == self.name } else { device.starts_with(&self.name) };
        is_named && self.port.is_none_or(|wanted| wanted == i64::from(port))
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        self.port.map_or(Ok(()), |port| write!(f, ":{port}"))
    }
}

/// The number at the front of a text, 0 when there is none, as C's `atoi` returns it.
fn number_at_front(text: &str) -> i64 {
    let text = text.trim_start();
    let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
    let length = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    let value: i64 = digits[..length].parse().unwrap_or(0);
    if text.starts_with('-') { -value } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PORTS: &[(&str, u8)] = &[("mlx5_0", 1), ("mlx5_1", 1), ("mlx5_1", 2), ("mlx5_10", 1), ("bnxt_re0", 1)];

    fn chosen(text: &str) -> Vec<String> {
        let filter = HcaFilter::parse(text);
        let ports = PORTS.iter().filter(|(device, port)| filter.choose(device, *port).is_some());
        ports.map(|(device, port)| format!("{device}:{port}")).collect()
    }

    #[test]
    fn names_are_prefixes_unless_they_are_to_be_exact_or_excluded() {
        let all = ["mlx5_0:1", "mlx5_1:1", "mlx5_1:2", "mlx5_10:1", "bnxt_re0:1"];
        assert_eq!(chosen(""), all);
        assert_eq!(chosen(","), all);
        assert_eq!(chosen("mlx5"), all[..4]);
        assert_eq!(chosen("mlx5_1"), all[1..4]);
        assert_eq!(chosen("=mlx5_1"), all[1..3]);
        assert_eq!(chosen("=mlx5_0,mlx5_10"), ["mlx5_0:1", "mlx5_10:1"]);
        assert_eq!(chosen("=mlx5"), [""; 0]);
        assert_eq!(chosen("^mlx5"), ["bnxt_re0:1"]);
        assert_eq!(chosen("^=mlx5_1"), ["mlx5_0:1", "mlx5_10:1", "bnxt_re0:1"]);
        assert_eq!(chosen("^"), [""; 0], "NCCL takes an empty exclusion for all devices");
    }

    #[test]
    fn a_port_narrows_its_name() {
        assert_eq!(chosen("mlx5_1:2"), ["mlx5_1:2"]);
        assert_eq!(chosen("=mlx5_1:1,bnxt_re0"), ["mlx5_1:1", "bnxt_re0:1"]);
        assert_eq!(chosen("^mlx5_1:2"), ["mlx5_0:1", "mlx5_1:1", "mlx5_10:1", "bnxt_re0:1"]);
        assert_eq!(chosen("=mlx5_1:"), ["mlx5_1:1", "mlx5_1:2"]);
        assert_eq!(chosen("=mlx5_1:-1"), ["mlx5_1:1", "mlx5_1:2"]);
        assert_eq!(chosen("mlx5:x"), [""; 0], "no number is port 0, which no device has");
    }

    #[test]
    fn rails_and_planes_come_with_the_choice() {
        let filter = HcaFilter::parse("=mlx5_0:1:3,mlx5_1::0:7");
        assert_eq!(filter.choose("mlx5_0", 1), Some(Choice { rail: 3, plane: UNKNOWN_ID }));
        assert_eq!(filter.choose("mlx5_1", 2), Some(Choice { rail: 0, plane: 7 }));
        assert_eq!(HcaFilter::parse("^mlx5_0").choose("x", 1), Some(Choice { rail: UNKNOWN_ID, plane: UNKNOWN_ID }));
    }

    #[test]
    fn entries_that_name_nothing_are_found() {
        let missing = |text: &str| HcaFilter::parse(text).unmatched(PORTS.iter().copied());
        assert_eq!(missing("mlx5,rxe0,=mlx5_7:1"), ["rxe0", "=mlx5_7:1"]);
        assert_eq!(missing("=mlx5_0:2,mlx5_0:1"), ["mlx5_0:2"]);
        assert_eq!(missing(""), [""; 0]);
    }
}

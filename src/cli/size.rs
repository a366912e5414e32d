//! Sizes in bytes as people write them.
//!
//! Guarantees: K, M, G and T are powers of 1024, as in nccl-tests; nothing is rounded silently.

use std::fmt;
use std::str::FromStr;

/// A number of bytes, read from "8", "64K", "1.5G", "16MiB".
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Size(pub(crate) usize);

const UNITS: [char; 4] = ['K', 'M', 'G', 'T'];

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("\"{text}\" is no size: write bytes, or a number with K, M, G or T (powers of 1024)");
        let upper = text.trim().to_ascii_uppercase();
        let number = upper.strip_suffix("IB").or_else(|| upper.strip_suffix('B')).unwrap_or(&upper);
        let unit = UNITS.iter().position(|&unit| number.ends_with(unit));
        let digits = if unit.is_some() { &number[..number.len() - 1] } else { number };
        if digits.is_empty() || !digits.chars().all(|c| c.is_ascii_digit() || c == '.') {
            return Err(wrong());
        }
        if unit.is_none() && upper.ends_with("IB") {
            return Err(wrong());
        }
        let factor = unit.map_or(1.0, |power| 1024_f64.powi(power as i32 + 1));
        let bytes = digits.parse::<f64>().map_err(|_| wrong())? * factor;
        if bytes.fract() != 0.0 {
            return Err(format!("\"{text}\" is no whole number of bytes"));
        }
        if bytes > (1_u64 << 50) as f64 {
            return Err(format!("\"{text}\" is more than 1024 T"));
        }
        Ok(Self(bytes as usize))
    }
}

impl fmt::Display for Size {
    /// The shortest way to write it that is exact.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut number, mut power) = (self.0, 0);
        while number != 0 && number % 1024 == 0 && power < UNITS.len() {
            (number, power) = (number / 1024, power + 1);
        }
        match power.checked_sub(1) {
            None => write!(f, "{number} B"),
            Some(unit) => write!(f, "{number} {}iB", UNITS[unit]),
        }
    }
}

/// The sizes from `begin` to `end`, each `factor` times the one before.
pub(crate) fn steps(begin: Size, end: Size, factor: usize) -> Vec<Size> {
    let next = |size: &Size| {
        let next = size.0.checked_mul(factor)?;
        (factor > 1 && next > size.0 && next <= end.0).then_some(Size(next))
    };
    std::iter::successors((begin <= end).then_some(begin), next).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_in_powers_of_1024() {
        for (text, bytes) in [
            ("8", 8),
            ("0", 0),
            ("64K", 65536),
            ("64k", 65536),
            ("1.5G", 3 << 29),
            ("16MiB", 16 << 20),
            ("2KB", 2048),
            ("7b", 7),
            ("1T", 1 << 40),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in ["", "K", "8X", "-1", "1e3", "0.3", "1.5", "8iB", "9999T", "1..5K", "nan", "inf"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_shown_exactly() {
        for (bytes, text) in
            [(8, "8 B"), (0, "0 B"), (1024, "1 KiB"), (1536, "1536 B"), (16 << 20, "16 MiB"), (3 << 29, "1536 MiB")]
        {
            assert_eq!(Size(bytes).to_string(), text);
        }
    }

    #[test]
    fn steps_end_at_the_last_size_that_fits() {
        let bytes = |begin, end, factor| steps(Size(begin), Size(end), factor).iter().map(|s| s.0).collect::<Vec<_>>();
        assert_eq!(bytes(8, 128, 4), [8, 32, 128]);
        assert_eq!(bytes(8, 127, 4), [8, 32]);
        assert_eq!(bytes(8, 8, 2), [8]);
        assert_eq!(bytes(8, 64, 1), [8]);
        assert_eq!(bytes(9, 8, 2), [0; 0]);
        assert_eq!(bytes(0, 8, 2), [0]);
    }
}

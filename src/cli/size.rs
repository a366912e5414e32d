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

/// The sizes from `begin` to `end`, each `factor` times the one before; else what is wrong with these options.
pub(crate) fn steps(begin: Size, end: Size, factor: usize) -> Result<Vec<Size>, String> {
    if begin > end {
        return Err(format!("there is no size to run: -b ({begin}) is above -e ({end})"));
    }
    if begin < end && factor < 2 {
        return Err(format!("-f {factor} does not lead from -b ({begin}) to -e ({end}): give 2 or more"));
    }
    if begin < end && begin.0 == 0 {
        return Err(format!("sizes cannot grow from 0 to -e ({end}): give -b 1 or more, or -e 0 as well"));
    }
    let next = |size: &Size| size.0.checked_mul(factor).map(Size).filter(|next| next > size && *next <= end);
    Ok(std::iter::successors(Some(begin), next).collect())
}

/// Whether buffers of this many bytes (`None`: more than can be counted) fit into this host's free memory.
pub(crate) fn check_memory(needed: Option<usize>) -> crate::os::error::Result<()> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let Some(free) = free_bytes(&meminfo).filter(|&free| needed.is_none_or(|needed| needed > free)) else {
        return Ok(());
    };
    let needed = needed.map_or("more than this host can address".to_owned(), gibibytes);
    let what = format!("the buffers need {needed} of memory, and this host has {} free", gibibytes(free));
    Err(crate::os::error::Error::usage(what).with_hint("choose a smaller -e, or fewer ranks"))
}

fn free_bytes(meminfo: &str) -> Option<usize> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.parse::<usize>().ok()?.checked_mul(1024)
}

fn gibibytes(bytes: usize) -> String {
    format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64)
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
        let bytes = |begin, end, factor| {
            let sizes = steps(Size(begin), Size(end), factor)?;
            Ok(sizes.iter().map(|size| size.0).collect::<Vec<_>>())
        };
        assert_eq!(bytes(8, 128, 4), Ok(vec![8, 32, 128]));
        assert_eq!(bytes(8, 127, 4), Ok(vec![8, 32]));
        assert_eq!(bytes(8, 8, 2), Ok(vec![8]));
        assert_eq!(bytes(8, 8, 1), Ok(vec![8]));
        assert_eq!(bytes(0, 0, 0), Ok(vec![0]));
        let wrong = |begin, end, factor| -> Result<Vec<usize>, String> { bytes(begin, end, factor) };
        assert!(wrong(9, 8, 2).unwrap_err().contains("-b (9 B) is above -e (8 B)"));
        assert!(wrong(8, 64, 1).unwrap_err().contains("-f 1"));
        assert!(wrong(8, 64, 0).unwrap_err().contains("-f 0"));
        assert!(wrong(0, 8, 2).unwrap_err().contains("from 0"));
    }

    #[test]
    fn buffers_that_do_not_fit_the_free_memory_are_refused() {
        assert_eq!(free_bytes("MemTotal: 9 kB\nMemAvailable:   20480 kB\n"), Some(20 << 20));
        assert_eq!(free_bytes("MemAvailable: much\n"), None);
        assert!(check_memory(Some(1 << 20)).is_ok());
        for needed in [Some(1 << 50), None] {
            let error = check_memory(needed).unwrap_err().to_string();
            assert!(error.contains("of memory, and this host has") && error.contains("smaller -e"), "{error}");
        }
    }
}

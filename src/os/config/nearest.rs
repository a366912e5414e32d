//! The search for what was probably meant.

use strsim::osa_distance;

/// The candidate nearest to `text` by edit distance, ignoring letter case. None when even the nearest has little in
/// common with it: more than half of the longer one's characters, without the common prefix, differ.
pub(crate) fn nearest<'a>(text: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let text = text.to_ascii_uppercase();
    let (distance, length, candidate) = candidates
        .into_iter()
        .map(|candidate| {
            let upper = candidate.to_ascii_uppercase();
            let own = upper.strip_prefix(super::PREFIX).unwrap_or(&upper);
            let given = text.strip_prefix(super::PREFIX).unwrap_or(&text);
            (osa_distance(given, own), own.chars().count().max(given.chars().count()), candidate)
        })
        .min_by_key(|(distance, ..)| *distance)?;
    (distance * 2 <= length).then_some(candidate)
}

/// Whether two names differ by one typing error: a character too many, missing or wrong, or two that are swapped.
pub(crate) fn is_slip(one: &str, other: &str) -> bool {
    osa_distance(one, other) == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_of_the_finger_costs_one() {
        assert!(is_slip("WORKERS", "WROKERS") && is_slip("warn", "wan") && is_slip("warn", "ward"));
        assert!(!is_slip("warn", "warn") && !is_slip("", "abc") && !is_slip("kitten", "sitting"));
    }

    #[test]
    fn nothing_is_suggested_for_something_wholly_different() {
        assert_eq!(nearest("TOWLINE_QQQQQQQQ", ["TOWLINE_RAILS", "TOWLINE_LOG"]), None);
        assert_eq!(nearest("TOWLINE_RIALS", ["TOWLINE_RAILS", "TOWLINE_LOG"]), Some("TOWLINE_RAILS"));
    }
}

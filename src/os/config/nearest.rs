//! The search for what was probably meant.

/// The candidate nearest to `text` by edit distance, without regard to letter case; none when even the nearest
/// has little in common with it (more than half of the longer one's characters, the common prefix aside, differ).
pub fn nearest<'a>(text: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let text = text.to_ascii_uppercase();
    let (distance, length, candidate) = candidates
        .into_iter()
        .map(|candidate| {
            let upper = candidate.to_ascii_uppercase();
            let own = upper.strip_prefix(super::PREFIX).unwrap_or(&upper);
            let given = text.strip_prefix(super::PREFIX).unwrap_or(&text);
            (edit_distance(given, own), own.chars().count().max(given.chars().count()), candidate)
        })
        .min_by_key(|(distance, ..)| *distance)?;
    (distance * 2 <= length).then_some(candidate)
}

/// How many characters must be inserted, removed, replaced or swapped with their neighbour to get from one text
/// to the other (optimal string alignment).
fn edit_distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut before_last = vec![0; b.len() + 1];
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i; b.len() + 1];
        for j in 1..=b.len() {
            let replace = last[j - 1] + usize::from(a[i - 1] != b[j - 1]);
            row[j] = replace.min(last[j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                row[j] = row[j].min(before_last[j - 2] + 1);
            }
        }
        before_last = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_of_the_finger_costs_one() {
        assert_eq!(edit_distance("", "abc"), 3);
        assert_eq!(edit_distance("WORKERS", "WROKERS"), 1);
        assert_eq!(edit_distance("warn", "wan"), 1);
        assert_eq!(edit_distance("kitten", "sitting"), 3);
    }

    #[test]
    fn nothing_is_suggested_for_something_wholly_different() {
        assert_eq!(nearest("TOWLINE_QQQQQQQQ", ["TOWLINE_RAILS", "TOWLINE_LOG"]), None);
        assert_eq!(nearest("TOWLINE_RIALS", ["TOWLINE_RAILS", "TOWLINE_LOG"]), Some("TOWLINE_RAILS"));
    }
}

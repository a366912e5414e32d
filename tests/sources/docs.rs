//! The pages and the sources agree: no message without an explanation, no link that leads nowhere.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// How a piece of code that makes messages begins, and what ends it.
const PLACES: [(&str, End); 17] = [
    ("tracing::warn!(", End::Call),
    ("tracing::error!(", End::Call),
    ("Error::new(", End::Call),
    ("Error::system(", End::Call),
    ("Error::argument(", End::Call),
    ("Error::usage(", End::Call),
    ("Error::remote(", End::Call),
    ("Error::internal(", End::Call),
    ("Finding::problem(", End::Call),
    ("Finding::advice(", End::Call),
    // The profiler's warnings.
    ("say(Level::Warn, ", End::Call),
    ("say(\n                Level::Warn,", End::Call),
    ("complaints.push(", End::Call),
    // The house's name for a sentence that becomes an error a few lines later.
    ("let what = ", End::Statement),
    // A complaint about the configuration.
    ("problem: ", End::Statement),
    ("fn missing_rail(", End::Function),
    ("fn down_rail(", End::Function),
];

#[derive(Clone, Copy, PartialEq)]
enum End {
    /// The bracket that closes the call.
    Call,
    /// A semicolon or comma outside of all brackets.
    Statement,
    /// A closing brace in the first column.
    Function,
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn files(below: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(below).expect("a directory").flatten() {
        let path = entry.path();
        if path.is_dir() {
            found.extend(files(&path, extension));
        } else if path.extension().is_some_and(|found| found == extension) {
            found.push(path);
        }
    }
    found
}

/// A source without its tests and comments.
fn code(path: &Path) -> String {
    if path.file_stem().is_some_and(|stem| stem == "tests" || stem == "simulation") {
        return String::new();
    }
    let text = read(path);
    let text = text.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    text.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

/// The string literals at the beginning of `text`, up to `end`.
fn literals(text: &str, end: End) -> Vec<String> {
    let text: Vec<char> = text.chars().collect();
    let mut found = Vec::new();
    let mut depth = 0;
    let mut at = 0;
    while at < text.len() {
        match text[at] {
            '(' | '{' | '[' => depth += 1,
            ')' | ']' | '}' if depth == 0 => break,
            '}' if end == End::Function && at > 0 && text[at - 1] == '\n' => break,
            ')' | ']' | '}' => depth -= 1,
            ';' | ',' if depth == 0 && end == End::Statement => break,
            // A character; a lifetime has no second quote there.
            '\'' if text.get(at + 2) == Some(&'\'') => at += 2,
            '\'' if text.get(at + 1) == Some(&'\\') && text.get(at + 3) == Some(&'\'') => at += 3,
            '"' => {
                // Such a sentence is for developers: it appears only behind "a defect of Towline".
                let is_expectation = text[..at].ends_with(&['e', 'x', 'p', 'e', 'c', 't', '(']);
                let (literal, length) = literal(&text[at + 1..]);
                at += length;
                if !is_expectation {
                    found.push(literal);
                }
            }
            _ => {}
        }
        at += 1;
    }
    found
}

/// The literal that begins behind a quote, and how many characters it takes with the closing quote.
fn literal(text: &[char]) -> (String, usize) {
    let mut out = String::new();
    let mut at = 0;
    while at < text.len() && text[at] != '"' {
        if text[at] == '\\' {
            at += 1;
            if text[at] == '\n' {
                // The line goes on: neither the break nor the indentation is part of the text.
                at += text[at..].iter().take_while(|c| c.is_whitespace()).count();
                continue;
            }
        }
        out.push(text[at]);
        at += 1;
    }
    (out, at + 1)
}

/// The literal with `…` for what is filled in.
fn pattern(literal: &str) -> String {
    let mut out = String::new();
    for (index, piece) in literal.split('{').enumerate() {
        if index == 0 {
            out.push_str(piece);
        } else {
            out.push('…');
            out.push_str(piece.split_once('}').map_or("", |(_, rest)| rest));
        }
    }
    // Two values side by side look like one.
    squeezed(&out.replace("……", "…"))
}

fn squeezed(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Every message, and where it is made. Texts of fewer than two words are frames around another message.
fn messages() -> BTreeSet<(String, String)> {
    let mut found = BTreeSet::new();
    for source in files(&Path::new(ROOT).join("src"), "rs") {
        let text = code(&source);
        let name = source.strip_prefix(ROOT).expect("below the root").display().to_string();
        for (begin, end) in PLACES {
            for (at, _) in text.match_indices(begin) {
                let skip = if end == End::Function { 0 } else { begin.len() };
                for literal in literals(&text[at + skip..], end) {
                    let pattern = pattern(&literal);
                    let is_word = |word: &&str| word.chars().filter(char::is_ascii_alphabetic).count() > 1;
                    if pattern.split(' ').filter(is_word).count() > 1 {
                        found.insert((pattern, name.clone()));
                    }
                }
            }
        }
    }
    found
}

#[test]
fn every_warning_and_error_is_explained() {
    let docs = Path::new(ROOT).join("docs");
    let page = squeezed(&(read(&docs.join("troubleshooting.md")) + &read(&docs.join("dev/messages.md"))));
    let all = messages();
    assert!(all.len() > 100, "the sources hold more messages than the {} that were found", all.len());
    let missing: Vec<_> = all.iter().filter(|(text, _)| !page.contains(text)).collect();
    let list: Vec<String> = missing.iter().map(|(text, source)| format!("{source}: {text}")).collect();
    assert!(
        missing.is_empty(),
        "docs/troubleshooting.md and docs/dev/messages.md lack {} of {} messages (… stands for what is filled in):\n{}",
        missing.len(),
        all.len(),
        list.join("\n")
    );
}

#[test]
fn messages_are_found_however_they_are_written() {
    let call = r#""one {x} two", if y { "three \
        four" } else { 'a' }.expect("never"), f('"', "five")) "six""#;
    assert_eq!(literals(call, End::Call), ["one {x} two", "three four", "five"]);
    assert_eq!(literals(r#"format!("a, b; {c:#}"); "d""#, End::Statement), ["a, b; {c:#}"]);
    assert_eq!(literals("fn f() {\n    \"a\"\n}\n\"b\"", End::Function), ["a"]);
    assert_eq!(pattern("took {} of {all:?}  bytes"), "took … of … bytes");
}

/// The anchors that GitHub makes of a page's headings.
fn anchors(page: &str) -> BTreeSet<String> {
    let headings = page.lines().filter(|line| line.starts_with('#'));
    let plain = |heading: &str| heading.trim_start_matches('#').trim().to_lowercase();
    let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    headings.map(|heading| plain(heading).chars().filter(kept).collect::<String>().replace(' ', "-")).collect()
}

#[test]
fn every_link_between_the_pages_leads_somewhere() {
    let mut pages = files(&Path::new(ROOT).join("docs"), "md");
    pages
        .extend(["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"].map(|name| Path::new(ROOT).join(name)));
    let mut links = 0;
    for page in pages {
        let text = read(&page);
        for rest in text.split("](").skip(1) {
            let target = rest.split(')').next().unwrap_or_default();
            if target.contains("://") {
                continue;
            }
            links += 1;
            let (file, anchor) = target.split_once('#').map_or((target, None), |(file, anchor)| (file, Some(anchor)));
            let file = if file.is_empty() { page.clone() } else { page.with_file_name(file) };
            assert!(file.exists(), "{}: the link to {target} leads nowhere", page.display());
            if let Some(anchor) = anchor {
                assert!(anchors(&read(&file)).contains(anchor), "{}: there is no {target}", page.display());
            }
        }
    }
    assert!(links > 10, "only {links} links were found");
}

/// A clock that an administrator or a time server sets may jump, and must end no connection: deadlines are `Instant`s.
/// Only traces name the time of day.
#[test]
fn deadlines_follow_the_monotonic_clock() {
    let root = Path::new(ROOT);
    let traces = root.join("src/trace");
    let words = ["SystemTime", "CLOCK_REALTIME", "gettimeofday", "UNIX_EPOCH", "libc::time(", "timerfd", "chrono::"];
    let uses = |path: &PathBuf| words.iter().any(|word| code(path).contains(word));
    let (in_traces, elsewhere): (Vec<_>, Vec<_>) =
        files(&root.join("src"), "rs").into_iter().filter(uses).partition(|path| path.starts_with(&traces));
    assert!(!in_traces.is_empty(), "the search finds nothing at all");
    assert!(elsewhere.is_empty(), "these ask for the time of day: {elsewhere:?}");
}

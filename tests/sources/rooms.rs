//! The rooms of the source: which room may import which, and that no files import each other in a circle.
//!
//! It reads the sources as text, without their tests. A module and the modules inside it count as one way down: the
//! outer one imports the inner ones, and an inner one may use what the outer ones hold.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

const SRC: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src");

/// What a room may import besides itself.
const ROOMS: [(&str, &[&str]); 12] = [
    ("nccl", &[]),
    ("os", &[]),
    ("engine", &["os", "nccl"]),
    ("session", &["engine", "os", "nccl"]),
    ("tcp", &["session", "engine", "os", "nccl"]),
    ("rdma", &["session", "engine", "os", "nccl"]),
    ("plugin", &["tcp", "rdma", "session", "engine", "os", "nccl"]),
    ("rma", &["plugin", "engine", "os", "nccl"]),
    ("trace", &["os", "nccl"]),
    ("abi", &["rma", "plugin", "trace", "os", "nccl"]),
    ("host", &["os", "nccl"]),
    // `doctor` shows which ports the RDMA backend would choose, so it calls the backend's own discovery.
    ("cli", &["host", "trace", "rdma", "os", "nccl"]),
];

/// Imports that break the rule, as `file: room`. This list only becomes shorter.
const UPWARD: [&str; 0] = [];

/// Files that import each other in a circle. This list only becomes shorter.
const CIRCLES: [&[&str]; 0] = [];

type Module = Vec<String>;

/// The modules of the library and the program, and their files below `src`.
fn modules() -> BTreeMap<Module, String> {
    let mut found = BTreeMap::new();
    let mut folders = vec![PathBuf::from(SRC)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("a folder").flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(SRC).expect("below src").to_str().expect("plain names").to_owned();
                let mut module: Module = name.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
                if matches!(module.last().map(String::as_str), Some("mod" | "lib")) {
                    module.pop();
                }
                found.insert(module, name);
            }
        }
    }
    found
}

/// A source without comments and tests.
fn code(name: &str) -> String {
    let text = fs::read_to_string(Path::new(SRC).join(name)).expect("a source");
    let text = text.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    text.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

/// Whether a file holds tests or is there for them.
fn is_of_tests(module: &[String]) -> bool {
    const FOR_TESTS: [&str; 4] = ["tests", "loopback", "simulation", "harness"];
    module.iter().any(|part| FOR_TESTS.contains(&part.as_str()))
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The paths that begin at `text`, with what comes in braces told apart.
fn tree(text: &str, before: &Module, found: &mut Vec<Module>) -> usize {
    let mut path = before.clone();
    let mut at = 0;
    loop {
        let rest = &text[at..];
        let word = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
        if word > 0 {
            path.push(rest[..word].to_owned());
            at += word;
        } else if rest.starts_with('{') {
            at += 1;
            loop {
                at += text[at..].find(|c: char| !c.is_whitespace() && c != ',').unwrap_or(0);
                if text[at..].is_empty() || text[at..].starts_with('}') {
                    return at + 1;
                }
                let length = tree(&text[at..], &path, found);
                let rest = &text[at + length..];
                // After `as NAME`, say.
                at += length + rest.find([',', '}']).unwrap_or(rest.len());
            }
        }
        if !text[at..].starts_with("::") {
            found.push(path);
            return at;
        }
        at += 2;
    }
}

/// All paths in a source that begin with `crate`, `super`, `self` or the library's name, from the root.
fn paths(module: &Module, code: &str) -> Vec<Module> {
    let mut found = Vec::new();
    for root in ["crate::", "super::", "self::", "towline::"] {
        for (at, _) in code.match_indices(root) {
            if code[..at].chars().next_back().is_some_and(|c| is_word(c) || c == ':') {
                continue;
            }
            let mut raw = Vec::new();
            tree(&code[at..], &Module::new(), &mut raw);
            for path in raw {
                let outer = path.iter().take_while(|part| *part == "super").count();
                let begin = match path[0].as_str() {
                    "crate" | "towline" => Module::new(),
                    "self" => module.clone(),
                    _ => module[..module.len().saturating_sub(outer)].to_vec(),
                };
                let rest = path.iter().skip(outer.max(1)).cloned();
                found.push(begin.into_iter().chain(rest).collect());
            }
        }
    }
    found
}

/// Which file imports which.
fn arrows() -> BTreeMap<String, BTreeSet<String>> {
    let modules = modules();
    let mut arrows: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (module, name) in modules.iter().filter(|(module, _)| !module.is_empty() && !is_of_tests(module)) {
        let to = arrows.entry(name.clone()).or_default();
        for path in paths(module, &code(name)) {
            let target = (1..=path.len()).rev().find_map(|length| modules.get_key_value(&path[..length]));
            if let Some((target, file)) = target
                && !module.starts_with(target)
            {
                to.insert(file.clone());
            }
        }
        let inner = modules.iter().filter(|(inner, _)| inner.len() == module.len() + 1 && inner.starts_with(module));
        to.extend(inner.filter(|(inner, _)| !is_of_tests(inner)).map(|(_, file)| file.clone()));
    }
    arrows
}

fn room(file: &str) -> &str {
    file.split(['/', '.']).next().unwrap_or_default()
}

#[test]
fn imports_point_down() {
    let mut found = BTreeSet::new();
    for (file, to) in arrows() {
        let Some((own, allowed)) = ROOMS.iter().find(|(name, _)| *name == room(&file)) else { continue };
        for target in to.iter().map(|target| room(target)).filter(|target| target != own && !allowed.contains(target)) {
            found.insert(format!("{file}: {target}"));
        }
    }
    let known: BTreeSet<String> = UPWARD.iter().map(|line| (*line).to_owned()).collect();
    let new: Vec<_> = found.difference(&known).collect();
    assert!(new.is_empty(), "a file imports a room that is not below its own: {new:#?}");
    let gone: Vec<_> = known.difference(&found).collect();
    assert!(gone.is_empty(), "take these out of UPWARD: {gone:#?}");
}

#[test]
fn no_files_import_each_other_in_a_circle() {
    let arrows = arrows();
    let reached = |from: &String| {
        let mut reached = BTreeSet::new();
        let mut open = vec![from];
        while let Some(file) = open.pop() {
            for next in arrows.get(file).into_iter().flatten() {
                if reached.insert(next.clone()) {
                    open.push(next);
                }
            }
        }
        reached
    };
    let all: BTreeMap<&String, BTreeSet<String>> = arrows.keys().map(|file| (file, reached(file))).collect();
    let is_mutual = |a: &String, b: &String| all[a].contains(b) && all.get(b).is_some_and(|back| back.contains(a));
    let circles: BTreeSet<Vec<&str>> = all
        .keys()
        .map(|file| all.keys().filter(|other| is_mutual(file, other)).map(|other| other.as_str()).collect())
        .filter(|circle: &Vec<_>| circle.len() > 1)
        .collect();
    let known: BTreeSet<Vec<&str>> = CIRCLES.iter().map(|circle| circle.to_vec()).collect();
    let new: Vec<_> = circles.difference(&known).collect();
    assert!(new.is_empty(), "files import each other in a circle: {new:#?}");
    let gone: Vec<_> = known.difference(&circles).collect();
    assert!(gone.is_empty(), "take these out of CIRCLES: {gone:#?}");
}

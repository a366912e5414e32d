//! The built library as the dynamic loader sees it: its symbols, its needs, its names. NCCL loads it into programs
//! that we do not know, so it must bring nothing along but the C runtime.

use std::collections::BTreeSet;
use std::ffi::CStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use towline::nccl::ffi;

/// The network tables: with [`PROFILER`], everything that the library may and must define for others.
const EXPORTS: [&str; 9] = [
    "ncclNetPlugin_v4",
    "ncclNetPlugin_v5",
    "ncclNetPlugin_v6",
    "ncclNetPlugin_v7",
    "ncclNetPlugin_v8",
    "ncclNetPlugin_v9",
    "ncclNetPlugin_v10",
    "ncclNetPlugin_v11",
    "ncclNetPlugin_v12",
];

/// The profiler's tables, which the library exports beside them.
const PROFILER: [&str; 7] = [
    "ncclProfiler_v1",
    "ncclProfiler_v2",
    "ncclProfiler_v3",
    "ncclProfiler_v4",
    "ncclProfiler_v5",
    "ncclProfiler_v6",
    "ncclProfiler_v7",
];

/// The tuner's tables.
const TUNER: [&str; 5] =
    ["ncclTunerPlugin_v2", "ncclTunerPlugin_v3", "ncclTunerPlugin_v4", "ncclTunerPlugin_v5", "ncclTunerPlugin_v6"];

/// The one-sided tables.
const RMA: [&str; 3] = ["ncclRmaPlugin_v14", "ncclRmaPlugin_v15", "ncclRmaPlugin_v16"];

/// FlagCX's network table.
const FLAGCX: [&str; 1] = ["flagcxNetAdaptorPlugin_v1"];

/// The C runtime: all that the library may need at load time, besides the loader itself.
const RUNTIME: [&str; 3] = ["libc.so.6", "libm.so.6", "libgcc_s.so.1"];

/// The names that NCCL looks for, each a link to the artefact.
const NAMES: [&str; 2] = ["libnccl-net.so", "libnccl-net-towline.so"];

/// What was built: the library's names lie beside the program.
fn built(name: &str) -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_towline")).with_file_name(name)
}

/// What a binutils program says about the library.
fn inspect(program: &str, arguments: &[&str]) -> String {
    let library = built(NAMES[0]);
    let output = Command::new(program).args(arguments).arg(&library).output();
    let output = output.unwrap_or_else(|error| panic!("{program} (package binutils) does not start: {error}"));
    assert!(output.status.success(), "{program} on {}: {output:?}", library.display());
    String::from_utf8(output.stdout).expect("binutils print text")
}

#[test]
fn exports_the_tables_of_the_interfaces_and_nothing_else() {
    let text = inspect("nm", &["-D", "--defined-only", "--format=posix"]);
    let found: BTreeSet<&str> = text.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(found, EXPORTS.into_iter().chain(PROFILER).chain(TUNER).chain(RMA).chain(FLAGCX).collect());
}

#[test]
fn needs_only_the_c_runtime_at_load_time() {
    let text = inspect("readelf", &["-d", "-W"]);
    let needed: Vec<&str> = text
        .lines()
        .filter(|line| line.contains("(NEEDED)"))
        .filter_map(|line| line.split_once('[')?.1.strip_suffix(']'))
        .collect();
    assert!(needed.contains(&"libc.so.6"), "readelf's output is not as expected: {text}");
    let strange: Vec<&&str> =
        needed.iter().filter(|name| !RUNTIME.contains(name) && !name.starts_with("ld-linux")).collect();
    assert!(strange.is_empty(), "{strange:?}");
}

#[test]
fn stays_mapped_after_dlclose() {
    let text = inspect("readelf", &["-d", "-W"]);
    let flags = text.lines().find(|line| line.contains("(FLAGS_1)")).unwrap_or_default();
    assert!(flags.contains("NODELETE"), "{text}");
}

#[test]
fn lies_under_both_names_that_nccl_looks_for() {
    for name in NAMES {
        let link = built(name);
        let target = fs::read_link(&link).unwrap_or_else(|error| panic!("{}: {error}", link.display()));
        assert!(target.is_relative(), "so that the directory can be moved: {}", target.display());
        assert!(link.exists(), "{} leads nowhere", link.display());
    }
}

#[test]
fn every_exported_table_is_found_by_dlsym_and_is_named_towline() {
    for name in NAMES {
        // SAFETY: our own library; loading it runs no code of ours.
        let library = unsafe { libloading::Library::new(built(name)) }.expect("dlopen");
        for symbol in EXPORTS {
            // SAFETY: each symbol is a table of the plugin interface, and all tables begin with their name.
            let table = unsafe { library.get::<*const ffi::ncclNet_v4_t>(symbol.as_bytes()) }.expect(symbol);
            // SAFETY: as above; the name is a string constant of the library, which stays mapped.
            assert_eq!(unsafe { CStr::from_ptr((**table).name) }, c"Towline", "{symbol}");
        }
    }
}

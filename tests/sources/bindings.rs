//! The committed bindings are what bindgen makes of the headers today.
//!
//! Nobody who builds Towline needs bindgen: `src/nccl/bindings.rs` (NCCL's and FlagCX's interfaces, from `ffi/`) and
//! `ffi/rdma-sys/src/bindings.rs` (libibverbs, from rdma-core's headers) are committed. These tests need libclang, the
//! second and the third also rdma-core's headers (packages libibverbs-dev and librdmacm-dev). Where these are missing a
//! test says so and passes; with `CHECK_BINDINGS=1` it fails.
//!
//! `TOWLINE_WRITE_BINDINGS=1 cargo test --test sources bindings::` writes the files after a header has changed.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// NCCL's interface, and FlagCX's, which is like it.
const INTERFACES: [&str; 4] = ["nccl_profiler.h", "nccl_tuner.h", "nccl_rma.h", "flagcx_net.h"];

/// The release of rdma-core that `ffi/rdma-sys/src/bindings.rs` was generated from.
const RDMA_CORE: &str = "44";

/// What Towline is built for. One file serves both: they agree in all but the sign of `char` and the size of glibc's
/// mutexes, which the files take from Rust's own types.
const TARGETS: [&str; 2] = ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"];

fn asked(variable: &str) -> bool {
    std::env::var(variable).is_ok_and(|value| value == "1")
}

/// Leaves a test out, unless `CHECK_BINDINGS=1` forbids it.
fn leave_out(missing: &str) {
    assert!(!asked("CHECK_BINDINGS"), "CHECK_BINDINGS=1, and {missing}");
    eprintln!("skipped: {missing}");
}

fn has_libclang() -> bool {
    // bindgen panics without it.
    std::panic::catch_unwind(bindgen::clang_version).is_ok()
}

/// The oldest Rust that Towline is built with, so that what bindgen writes does not depend on the one in use.
fn rust() -> bindgen::RustTarget {
    bindgen::RustTarget::stable(88, 0).unwrap_or_else(|_| panic!("bindgen knows Rust 1.88"))
}

fn compare(fresh: &str, path: &str) {
    let committed = Path::new(ROOT).join(path);
    if asked("TOWLINE_WRITE_BINDINGS") {
        std::fs::write(&committed, fresh).expect("the sources can be written");
    }
    let committed = std::fs::read_to_string(committed).unwrap_or_default();
    let differing = committed.lines().zip(fresh.lines()).find(|(old, new)| old != new);
    assert!(
        committed == fresh,
        "{path} is not what bindgen makes of the headers (lines {} and {}; first difference: {differing:?}): \
         TOWLINE_WRITE_BINDINGS=1 cargo test --test sources bindings::",
        committed.lines().count(),
        fresh.lines().count(),
    );
}

#[test]
fn the_interface_of_nccl_is_as_its_headers_say() {
    if !has_libclang() {
        return leave_out("there is no libclang (Debian's package libclang-dev)");
    }
    for target in TARGETS {
        let fresh = bindgen::Builder::default()
            .header_contents("all.h", &INTERFACES.map(|header| format!("#include \"ffi/{header}\"\n")).concat())
            .clang_arg(format!("-I{ROOT}"))
            .clang_arg(format!("--target={target}"))
            // Takes the compiler's own stdint.h: the C library's is not there for the other processor.
            .clang_arg("-ffreestanding")
            .allowlist_file(".*ffi/(nccl|flagcx)_.*")
            .rust_target(rust())
            .rust_edition(bindgen::RustEdition::Edition2024)
            .prepend_enum_name(false)
            // tests/abi/layout.rs checks layouts, and against NCCL's own figures.
            .layout_tests(false)
            .default_macro_constant_type(bindgen::MacroTypeVariation::Signed)
            .generate_comments(false)
            .generate()
            .expect("bindgen reads ffi/");
        compare(&fresh.to_string(), "src/nccl/bindings.rs");
    }
}

/// The types of rdma-core's that `ffi/rdma-sys/src/types.rs` declares by hand, since they have unions, and those of the
/// C library, which the `libc` crate has.
const BY_HAND: [&str; 18] = [
    "in6_addr",
    "pthread_.*",
    "__pthread_.*",
    "sockaddr.*",
    "timespec",
    "ibv_ah_attr",
    "ibv_async_event",
    "ibv_flow_spec",
    "ibv_gid",
    "ibv_global_route",
    "ibv_mw_bind_info",
    "ibv_ops_wr",
    "ibv_send_wr",
    "ibv_wc",
    "rdma_addr",
    "rdma_cm_event",
    "rdma_ib_addr",
    "rdma_ud_param",
];

/// Enumerations whose values are combined: flags, masks, capabilities.
const FLAGS: [&str; 37] = [
    "ibv_device_cap_flags",
    "ibv_odp_transport_cap_bits",
    "ibv_odp_general_caps",
    "ibv_rx_hash_function_flags",
    "ibv_rx_hash_fields",
    "ibv_raw_packet_caps",
    "ibv_tm_cap_flags",
    "ibv_pci_atomic_op_size",
    "ibv_port_cap_flags",
    "ibv_port_cap_flags2",
    "ibv_create_cq_wc_flags",
    "ibv_wc_flags",
    "ibv_access_flags",
    "ibv_xrcd_init_attr_mask",
    "ibv_rereg_mr_flags",
    "ibv_srq_attr_mask",
    "ibv_srq_init_attr_mask",
    "ibv_wq_init_attr_mask",
    "ibv_wq_flags",
    "ibv_wq_attr_mask",
    "ibv_ind_table_init_attr_mask",
    "ibv_qp_init_attr_mask",
    "ibv_qp_create_flags",
    "ibv_qp_create_send_ops_flags",
    "ibv_qp_open_attr_mask",
    "ibv_qp_attr_mask",
    "ibv_send_flags",
    "ibv_ops_flags",
    "ibv_cq_attr_mask",
    "ibv_flow_flags",
    "ibv_flow_action_esp_mask",
    "ibv_cq_init_attr_mask",
    "ibv_create_cq_attr_flags",
    "ibv_parent_domain_init_attr_mask",
    "ibv_read_counters_flags",
    "ibv_values_mask",
    "(ib_uverbs_access_flags|rdma_cm_join_mc_attr_mask|rdma_cm_mc_join_flags)",
];

/// Enumerations that become modules of numbers.
const MODULES: [&str; 25] = [
    "ibv_node_type",
    "ibv_transport_type",
    "ibv_atomic_cap",
    "ibv_mtu",
    "ibv_port_state",
    "ibv_wc_status",
    "ibv_wc_opcode",
    "ibv_mw_type",
    "ibv_rate",
    "ibv_srq_type",
    "ibv_wq_type",
    "ibv_wq_state",
    "ibv_qp_type",
    "ibv_qp_state",
    "ibv_mig_state",
    "ibv_wr_opcode",
    "ibv_ops_wr_opcode",
    "ibv_flow_attr_type",
    "ibv_flow_spec_type",
    "ibv_counter_description",
    "ibv_rereg_mr_err_code",
    "ib_uverbs_advise_mr_advice",
    "rdma_cm_event_type",
    "rdma_driver_id",
    "rdma_port_space",
];

/// The release of rdma-core whose headers are installed, as pkg-config's file of libibverbs has it.
fn rdma_core() -> Option<String> {
    let arch = std::env::consts::ARCH;
    [format!("/usr/lib/{arch}-linux-gnu"), "/usr/lib64".to_owned(), "/usr/lib".to_owned()].iter().find_map(|place| {
        let text = std::fs::read_to_string(format!("{place}/pkgconfig/libibverbs.pc")).ok()?;
        // "Version: 1.14.44.0": the interface's number, then the release's.
        Some(text.lines().find_map(|line| line.strip_prefix("Version: "))?.split('.').nth(2)?.to_owned())
    })
}

#[test]
fn the_interface_of_libibverbs_is_as_its_headers_say() {
    if !has_libclang() {
        return leave_out("there is no libclang (Debian's package libclang-dev)");
    }
    match rdma_core() {
        Some(release) if release == RDMA_CORE => {}
        Some(release) => {
            eprintln!("skipped: the bindings are those of rdma-core {RDMA_CORE}, the headers here of {release}");
            return;
        }
        None => return leave_out("there are no headers of rdma-core (packages libibverbs-dev and librdmacm-dev)"),
    }
    for target in TARGETS {
        let here = target.starts_with(std::env::consts::ARCH);
        // The C library of the other processor, where a cross compiler has brought it.
        let sysroot = format!("/usr/{}/include", target.replace("-unknown", ""));
        if !here && !Path::new(&sysroot).join("stdint.h").exists() {
            continue;
        }
        let mut builder = bindgen::Builder::default()
            .header(format!("{ROOT}/ffi/rdma-sys/src/bindings.h"))
            .clang_arg(format!("--target={target}"))
            .allowlist_function("(ibv|rdma)_.*")
            .allowlist_type("(ibv|rdma|verbs)_.*|ib_uverbs_access_flags")
            .rust_target(rust())
            .rust_edition(bindgen::RustEdition::Edition2021)
            .rustified_enum("ibv_event_type")
            .derive_debug(false)
            .layout_tests(false)
            .generate_comments(false)
            .prepend_enum_name(false)
            .disable_untagged_union();
        if !here {
            builder = builder.clang_args(["-isystem", &sysroot, "-isystem", "/usr/include"]);
        }
        for name in BY_HAND {
            builder = builder.blocklist_type(name);
        }
        for name in FLAGS {
            builder = builder.bitfield_enum(name);
        }
        for name in MODULES {
            builder = builder.constified_enum_module(name);
        }
        let fresh = builder.generate().expect("bindgen reads rdma-core's headers");
        compare(&fresh.to_string(), "ffi/rdma-sys/src/bindings.rs");
    }
}

/// The text between the line `begin` and the brace that closes it.
fn block<'a>(text: &'a str, begin: &str) -> impl Iterator<Item = &'a str> {
    let (_, rest) = text.split_once(begin).expect("the list is there");
    let (block, _) = rest.split_once("\n}").expect("and ends");
    block.lines().map(str::trim).filter(|line| !line.is_empty())
}

/// The lists of `ffi/rdma-sys/src/layout.rs` as assertions of C.
fn assertions() -> String {
    let text = std::fs::read_to_string(format!("{ROOT}/ffi/rdma-sys/src/layout.rs")).expect("the source is here");
    let mut c = "#include <stddef.h>\n#include <infiniband/verbs.h>\n".to_owned();
    let mut assert = |what: &str, number: &str| {
        writeln!(c, "_Static_assert({what} == {number}, \"{what} is not {number}\");").expect("a string grows");
    };
    let mut kind = String::new();
    for line in block(&text, "\nlayouts! {\n") {
        if let Some(head) = line.strip_suffix('{') {
            let (name, size) = head.split_once('=').unwrap_or((head, ""));
            kind = format!("{} {}", if name.trim() == "ibv_gid" { "union" } else { "struct" }, name.trim());
            if !size.is_empty() {
                assert(&format!("sizeof({kind})"), size.trim());
            }
        } else if line != "}" {
            let (field, offset) =
                line.strip_suffix(',').and_then(|line| line.split_once(": ")).expect("field: offset,");
            // Unions that have no name in C.
            let field = field.replace("imm_data_invalidated_rkey_union", "imm_data").replace("bind_mw_tso_union.", "");
            assert(&format!("offsetof({kind}, {field})"), offset);
        }
    }
    for line in block(&text, "\nnumbers! {\n") {
        let (name, number) = line.strip_suffix(';').and_then(|line| line.split_once(" = ")).expect("name = number;");
        let (_, name) = name.split_once("::").expect("module::name");
        assert(&format!("(unsigned)({})", name.trim_end_matches(".0")), &format!("{number}u"));
    }
    c
}

/// The layouts that Towline relies on, against the installed headers and those in the directories that
/// `TOWLINE_RDMA_HEADERS` names, separated by colons: each holds `infiniband/` and `rdma/`, as rdma-core installs them.
/// They hold in every release from 33 to 65, on x86-64 and aarch64: those of Debian 11 to 14, Ubuntu 22.04 to 26.04,
/// all of RHEL 9.
#[test]
fn structs_of_libibverbs_have_the_layout_that_a_c_compiler_sees() {
    let more = std::env::var("TOWLINE_RDMA_HEADERS").unwrap_or_default();
    let mut places: Vec<&str> = more.split(':').filter(|place| !place.is_empty()).collect();
    if Path::new("/usr/include/infiniband/verbs.h").exists() {
        places.push("");
    }
    if places.is_empty() {
        return leave_out("there are no headers of rdma-core (package libibverbs-dev)");
    }
    let right = assertions();
    let cross = ["aarch64-linux-gnu-gcc"].into_iter().filter(|name| Command::new(name).arg("-v").output().is_ok());
    for compiler in ["cc"].into_iter().chain(cross) {
        for place in &places {
            // The installed headers are this processor's.
            if place.is_empty() && compiler != "cc" {
                continue;
            }
            compile(compiler, place, &right).unwrap_or_else(|said| panic!("{compiler}, headers in '{place}':\n{said}"));
        }
    }
    // A field that is elsewhere is found.
    let wrong = right.replace(
        "offsetof(struct ibv_send_wr, wr.rdma.rkey) == 48",
        "offsetof(struct ibv_send_wr, wr.rdma.rkey) == 44",
    );
    let said = compile("cc", places[0], &wrong).expect_err("the key of a remote region is not at 44");
    assert!(said.contains("wr.rdma.rkey"), "{said}");
}

/// Compiles a text of C with the headers in a directory, or the installed ones; else what the compiler says.
fn compile(compiler: &str, headers: &str, text: &str) -> Result<(), String> {
    let folder = tempfile::tempdir().expect("a directory for temporary files");
    let source = folder.path().join("layout.c");
    std::fs::write(&source, text).expect("a file");
    let mut command = Command::new(compiler);
    command.args(["-std=c11", "-fsyntax-only"]).arg(&source);
    if !headers.is_empty() {
        command.arg("-I").arg(headers);
    }
    let output = command.output().expect("a C compiler (package gcc) runs");
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

//! The command line as a user meets it: whole processes, their output and their exit status.

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

fn towline(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
    command.args(arguments).stdin(Stdio::null());
    // What the developer has set must not decide.
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("NCCL_") || name.to_string_lossy().starts_with("TOWLINE_") {
            command.env_remove(name);
        }
    }
    command.env("NCCL_CONF_FILE", "/nonexistent");
    command
}

fn run(arguments: &[&str]) -> Output {
    towline(arguments).output().expect("towline starts")
}

fn out(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn err(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn assert_exit(output: &Output, code: i32) {
    assert_eq!(output.status.code(), Some(code), "{}\n{}", out(output), err(output));
}

/// The table's rows, cut at blanks.
fn rows(output: &Output) -> Vec<Vec<String>> {
    let text = out(output);
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| line.split_whitespace().map(str::to_owned).collect()).collect()
}

/// Builds a library of a source in this folder with the compiler that also links Rust programs.
fn built(source: &str, library: &str) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(source);
    let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join(library);
    fs::create_dir_all(library.parent().expect("a folder")).expect("a folder");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(source).arg("-ldl");
    assert!(compiler.status().expect("cc starts").success());
    library
}

/// The plugin of `tests/faulty_plugin.c`, built once.
fn faulty_plugin() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| built("faulty_plugin.c", "libfaulty.so"))
}

fn with_fault(mode: &str, arguments: &[&str]) -> Output {
    let real = Path::new(env!("CARGO_BIN_EXE_towline")).with_file_name("libnccl-net.so");
    let mut command = towline(arguments);
    command.arg("--plugin").arg(faulty_plugin()).env("FAULTY_REAL", real).env("FAULTY_MODE", mode);
    command.output().expect("towline starts")
}

const SMALL: &[&str] = &["all-reduce", "-b", "8", "-e", "128K", "-f", "16", "-n", "3", "-w", "1", "--timeout", "20"];

#[test]
fn all_reduce_prints_nccl_tests_columns_and_json() {
    let dir = tempfile::tempdir().unwrap();
    let json = dir.path().join("out.json");
    let output = run(&[SMALL, &["--json", json.to_str().unwrap()]].concat());
    assert_exit(&output, 0);
    let rows = rows(&output);
    let sizes: Vec<&str> = rows.iter().map(|row| row[0].as_str()).collect();
    assert_eq!(sizes, ["8", "128", "2048", "32768"]);
    for row in &rows {
        assert_eq!(row.len(), 13, "{row:?}");
        assert_eq!(row[2..5], ["float", "sum", "-1"]);
        assert_eq!((row[8].as_str(), row[12].as_str()), ("0", "0"), "the wrong columns: {row:?}");
    }
    let text = out(&output);
    assert!(text.contains("# Out of bounds values : 0 OK\n"), "{text}");
    assert!(text.lines().last().unwrap().starts_with("# Avg bus bandwidth    : "), "{text}");
    let json: serde_json::Value = serde_json::from_slice(&fs::read(json).unwrap()).unwrap();
    assert_eq!(json["results"][3]["size"], 32768);
    assert_eq!(json["results"][3]["in_place"]["wrong"], 0);
    assert!(json["results"][0]["out_of_place"]["time_us"].as_f64().unwrap() > 0.0);
    assert_eq!(json["plugins"][1]["plugin"], "Towline");
}

#[test]
fn all_reduce_runs_with_every_interface_version_and_odd_ranks() {
    for version in 4..=12 {
        let version = format!("v{version}");
        let output = run(&[
            "all-reduce",
            "-b",
            "12",
            "-e",
            "1M",
            "-f",
            "250",
            "-n",
            "2",
            "-w",
            "0",
            "--ranks",
            "3",
            "--api",
            &version,
        ]);
        assert_exit(&output, 0);
        assert!(out(&output).contains(&format!("Towline {version},")), "{}", out(&output));
        assert!(rows(&output).len() > 2);
    }
}

#[test]
fn wrong_data_is_counted_and_told_by_the_exit_status() {
    let output = with_fault("corrupt", SMALL);
    assert_exit(&output, 3);
    assert!(out(&output).contains("FAILED"), "{}", out(&output));
    assert!(rows(&output).iter().all(|row| row[8] != "0" && row[12] != "0"), "{}", out(&output));
    let output = with_fault("corrupt", &["send-recv", "-e", "64K", "--repetitions", "1", "--time", "5"]);
    assert_exit(&output, 3);
    assert!(out(&output).contains("FAILED"), "{}", out(&output));
}

#[test]
fn a_plugin_that_misbehaves_ends_the_run_with_its_name_for_it() {
    for (mode, message) in [
        ("crash", "aborted (SIGABRT)"),
        ("sigpipe", "SIGPIPE"),
        ("hang", "nothing moved for 2 s"),
        ("short", "bytes arrived where"),
        ("overrun", "wrote behind the end of the connection handle"),
    ] {
        let start = Instant::now();
        let output = with_fault(mode, &["all-reduce", "-b", "4K", "-e", "64K", "--timeout", "2"]);
        assert_exit(&output, 1);
        assert!(err(&output).contains(message), "{mode}: {}", err(&output));
        assert!(start.elapsed() < Duration::from_secs(20), "{mode}");
    }
    let output = with_fault("none", SMALL);
    assert_exit(&output, 0);
}

/// A process that is ended when the test is over.
struct Running(Child);

impl Running {
    fn start(mut command: Command) -> Self {
        // A shell starts what runs in the background with SIGINT ignored, and that is inherited.
        // SAFETY: between fork and exec only a system call is made.
        unsafe {
            command.pre_exec(|| {
                libc::signal(libc::SIGINT, libc::SIG_DFL);
                Ok(())
            });
        }
        Self(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("towline starts"))
    }

    fn children(&self) -> Vec<u32> {
        let id = self.0.id();
        let text = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
        text.split_whitespace().map(|id| id.parse().unwrap()).collect()
    }

    /// Reads standard output until a line contains `text`.
    fn await_line(&mut self, text: &str) {
        let stdout = self.0.stdout.as_mut().unwrap();
        let mut lines = BufReader::with_capacity(1, stdout).lines();
        assert!(lines.any(|line| line.unwrap().contains(text)), "no line with {text}");
    }

    /// Waits for the end and returns status and standard error.
    fn end(&mut self) -> (Option<i32>, String) {
        let mut text = String::new();
        self.0.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        (self.0.wait().unwrap().code(), text)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs that go on until they are ended, and how many processes each starts.
const ENDLESS: [(&[&str], usize); 2] = [
    (&["all-reduce", "-b", "8", "-e", "1M", "-f", "131072", "-n", "1000000"], 2),
    (&["send-recv", "-b", "1M", "-e", "1M", "--time", "1000000"], 1),
];

/// Such a run, and its processes.
fn endless(command: Command, processes: usize) -> (Running, Vec<u32>) {
    let mut run = Running::start(command);
    // The headings come when they are connected.
    run.await_line("(B)");
    let children = run.children();
    assert_eq!(children.len(), processes);
    (run, children)
}

fn is_gone(process: u32) -> bool {
    // A zombie still has a directory, but no command line.
    fs::read(format!("/proc/{process}/cmdline")).map_or(true, |line| line.is_empty())
}

fn await_gone(processes: &[u32]) {
    let start = Instant::now();
    while !processes.iter().all(|&process| is_gone(process)) {
        assert!(start.elapsed() < Duration::from_secs(10), "still there: {processes:?}");
        thread::sleep(Duration::from_millis(20));
    }
}

fn kill(process: u32) {
    // SAFETY: a signal to a process that this test started.
    assert_eq!(unsafe { libc::kill(process as libc::pid_t, libc::SIGKILL) }, 0);
}

#[test]
fn a_killed_rank_is_named_and_takes_the_others_with_it() {
    let (mut run, ranks) = endless(towline(ENDLESS[0].0), ENDLESS[0].1);
    let start = Instant::now();
    kill(ranks[1]);
    let (status, text) = run.end();
    assert_eq!(status, Some(1));
    assert!(text.contains("rank 1 was killed (SIGKILL)"), "{text}");
    assert!(start.elapsed() < Duration::from_secs(5));
    await_gone(&ranks);
}

#[test]
fn processes_die_with_the_program() {
    for (arguments, processes) in ENDLESS {
        let (run, children) = endless(towline(arguments), processes);
        kill(run.0.id());
        await_gone(&children);
    }
}

#[test]
fn a_reader_that_goes_away_ends_the_program_quietly() {
    let mut run = Running::start(towline(&["all-reduce", "-b", "8", "-e", "64", "-f", "2", "-n", "2000"]));
    let ranks = {
        run.await_line("rank 0");
        run.children()
    };
    drop(run.0.stdout.take());
    let (status, text) = run.end();
    assert_eq!(status, Some(141), "{text}");
    assert_eq!(text, "");
    await_gone(&ranks);
}

#[test]
fn what_cannot_run_says_why() {
    for (arguments, status, message) in [
        (&["all-reduce", "--plugin", "/nonexistent.so"][..], 1, "/nonexistent.so"),
        (&["all-reduce", "--plugin", "libc.so.6"], 1, "no network plugin"),
        (&["all-reduce", "--device", "99"], 1, "no device 99"),
        (&["all-reduce", "--api", "v3"], 2, "no API version"),
        (&["all-reduce", "--ranks", "1"], 2, "--ranks"),
        (&["all-reduce", "--ranks", "2", "--late", "2:1"], 2, "there are ranks 0 to 1"),
        (&["all-reduce", "-b", "1K", "-e", "8"], 2, "-b (1 KiB) is above -e (8 B)"),
        (&["all-reduce", "-b", "0", "-e", "0"], 2, "none has room for one element"),
        (&["all-reduce", "-b", "0", "-e", "8"], 2, "cannot grow from 0"),
        (&["all-reduce", "-b", "8", "-e", "64", "-f", "0"], 2, "-f 0 does not lead"),
        (&["all-reduce", "-b", "1.5"], 2, "no whole number"),
        (&["all-reduce", "-b", "1000T", "-e", "1000T"], 1, "of memory, and this host has"),
        (&["all-reduce", "--wrap", "/nonexistent/taskset -c 0"], 1, "rank 0 behind `/nonexistent/taskset -c 0`"),
        (&["send-recv", "-b", "1K", "-e", "8"], 2, "-b (1 KiB) is above -e (8 B)"),
        (&["send-recv", "-b", "8", "-e", "64", "-f", "1"], 2, "-f 1 does not lead"),
        (&["send-recv", "-b", "1000T", "-e", "1000T"], 1, "of memory, and this host has"),
        (&["send-recv", "--connect", "nowhere"], 2, "write HOST:PORT"),
        (&["send-recv", "--listen", "127.0.0.1:99999"], 2, "write HOST:PORT"),
        (&["trace", "report", "/nonexistent"], 1, "/nonexistent"),
        (&["trace", "merge", "a.pftrace", "-o", "a.pftrace"], 2, "would be overwritten"),
        (&["send-recv", "--plugin", "/nonexistent.so"], 1, "/nonexistent.so"),
        (&["send-recv", "--connect", "127.0.0.1:1"], 1, "127.0.0.1:1"),
        (&["rank"], 1, "started by towline itself"),
    ] {
        let output = run(arguments);
        assert_exit(&output, status);
        assert!(err(&output).contains(message), "{arguments:?}: {}", err(&output));
    }
}

#[test]
fn without_arguments_it_says_what_it_can_do() {
    let output = run(&[]);
    assert_exit(&output, 2);
    for told in ["Usage: towline <COMMAND>", "all-reduce", "doctor", "Exit status:"] {
        assert!(err(&output).contains(told), "{told}: {}", err(&output));
    }
}

#[test]
fn sixty_four_ranks_run_on_any_host() {
    let output = run(&["all-reduce", "--ranks", "64", "-b", "8", "-e", "8", "-n", "1", "-w", "0"]);
    assert_exit(&output, 0);
    assert!(out(&output).contains("Out of bounds values : 0 OK"), "{}", out(&output));
}

#[test]
fn a_misspelt_variable_is_named_beside_the_right_one() {
    let mut command = towline(&["all-reduce", "-b", "8", "-e", "8", "-n", "1", "-w", "0"]);
    let output = command.env("TOWLINE_STREAM", "4").output().expect("towline starts");
    assert_exit(&output, 0);
    assert!(err(&output).contains("did you mean TOWLINE_STREAMS?"), "{}", err(&output));
}

/// On a terminal a line says how far it has come; elsewhere there is none.
#[test]
fn progress_is_shown_on_a_terminal_only() {
    const ARGUMENTS: [&str; 9] = ["send-recv", "-b", "8", "-e", "8", "--repetitions", "2", "--time", "5"];
    let output = run(&ARGUMENTS);
    assert_exit(&output, 0);
    assert!(!err(&output).contains("measurement") && !out(&output).contains('\r'), "{}", err(&output));
    let shown = on_terminal(&ARGUMENTS);
    assert!(shown.contains("\r8 B: measurement 1 of 2"), "{shown}");
}

/// What a terminal (that of util-linux's `script`) is sent by a command that succeeds.
fn on_terminal(arguments: &[&str]) -> String {
    let line = format!("{} {}", env!("CARGO_BIN_EXE_towline"), arguments.join(" "));
    let mut script = Command::new("script");
    let script = script.args(["-qec", &line, "/dev/null"]).stdin(Stdio::null());
    let output = script.env("NCCL_CONF_FILE", "/nonexistent").output().expect("script, of util-linux");
    assert_exit(&output, 0);
    out(&output)
}

/// The commands that read traces say how far they are, which takes seconds for hundreds of megabytes.
#[test]
fn trace_commands_show_their_progress_on_a_terminal_only() {
    let dir = tempfile::tempdir().expect("a directory for temporary files");
    let mut command = towline(&["all-reduce", "-b", "8", "-e", "8", "-n", "1", "-w", "0"]);
    command.env("TOWLINE_PROFILE", "trace").env("TOWLINE_PROFILE_DIR", dir.path());
    assert_exit(&command.output().expect("towline starts"), 0);
    let entries = fs::read_dir(dir.path()).expect("the directory is there");
    let mut files: Vec<_> = entries.map(|entry| entry.expect("an entry").path().display().to_string()).collect();
    files.retain(|file| file.ends_with(".pftrace"));
    assert_eq!(files.len(), 2, "one for each rank");
    let [picture, all] = ["a.svg", "all.pftrace"].map(|name| dir.path().join(name).display().to_string());
    for (command, output, then) in [
        ("report", None, "summing up"),
        ("check", None, "checking"),
        ("draw", Some(picture.as_str()), "drawing rank 0"),
        ("merge", Some(all.as_str()), "writing: 100 %"),
    ] {
        let mut arguments = vec!["trace", command, files[0].as_str(), files[1].as_str()];
        arguments.extend(output.iter().flat_map(|file| ["-o", *file]));
        let shown = on_terminal(&arguments);
        assert!(shown.contains("\rreading: 100 %") && shown.contains(&format!("\r{then}")), "{command}: {shown:?}");
        let elsewhere = run(&arguments);
        assert!(err(&elsewhere).is_empty() && !out(&elsewhere).contains('\r'), "{command}: {}", err(&elsewhere));
    }
}

/// What is wrong with several options together is told with the usage of the subcommand.
#[test]
fn the_usage_line_names_the_subcommand() {
    for (arguments, usage) in [
        (&["all-reduce", "-b", "1K", "-e", "8"][..], "Usage: towline all-reduce [OPTIONS]"),
        (&["send-recv", "-b", "1K", "-e", "8"], "Usage: towline send-recv [OPTIONS]"),
        (&["trace", "merge", "a.pftrace", "-o", "a.pftrace"], "Usage: towline trace merge"),
    ] {
        let output = run(arguments);
        assert_exit(&output, 2);
        assert!(err(&output).contains(usage), "{arguments:?}: {}", err(&output));
    }
}

const ON_GPU: [&[&str]; 2] = [
    &["all-reduce", "-b", "8", "-e", "1M", "-f", "64", "-n", "3", "-w", "1", "--timeout", "20", "--gpu"],
    &["send-recv", "-b", "8", "-e", "1M", "-f", "64", "--repetitions", "2", "--time", "5", "--timeout", "20", "--gpu"],
];

/// With a stand-in for CUDA's driver, and a plugin that wants its memory registered as the GPU's and what it received
/// flushed: every byte comes from there and gets there.
#[test]
fn buffers_in_gpu_memory_are_filled_registered_flushed_and_verified() {
    let driver = built("cuda_stand_in.c", "cuda/libcuda.so.1");
    let real = Path::new(env!("CARGO_BIN_EXE_towline")).with_file_name("libnccl-net.so");
    for arguments in ON_GPU {
        let mut command = towline(arguments);
        command.arg("--plugin").arg(faulty_plugin()).env("FAULTY_REAL", &real).env("FAULTY_MODE", "gpu");
        command.env("LD_LIBRARY_PATH", driver.parent().expect("a folder"));
        let output = command.output().expect("towline starts");
        assert_exit(&output, 0);
        let wrong = if arguments[0] == "all-reduce" { 12 } else { 5 };
        assert_eq!(rows(&output).len(), 3, "{}", out(&output));
        assert!(rows(&output).iter().all(|row| row[wrong] == "0"), "{}", out(&output));
        // The stand-in has one GPU.
        let mut command = towline(&arguments[..arguments.len() - 1]);
        command.arg("--gpu=1").arg("--plugin").arg(faulty_plugin()).env("FAULTY_REAL", &real).env("FAULTY_MODE", "gpu");
        let output = command.env("LD_LIBRARY_PATH", driver.parent().expect("a folder")).output().expect("it starts");
        assert_exit(&output, 1);
        assert!(err(&output).contains("there is no GPU 1"), "{}", err(&output));
    }
}

#[test]
fn gpu_buffers_without_a_driver_or_a_device_for_them_are_refused_with_advice() {
    for arguments in ON_GPU {
        let output = run(arguments);
        assert_exit(&output, 1);
        let text = err(&output);
        assert!(text.contains("takes no GPU memory, only host memory") && text.contains("towline doctor"), "{text}");
        // On a host with NVIDIA's driver this plugin would be given memory that it cannot read.
        // SAFETY: the driver's initialisers do not call back.
        if unsafe { libloading::Library::new("libcuda.so.1") }.is_err() {
            let output = with_fault("gpu", arguments);
            assert_exit(&output, 1);
            let text = err(&output);
            assert!(text.contains("libcuda.so.1 was not found") && text.contains("--gpus all"), "{text}");
        }
    }
}

#[test]
fn variables_come_from_nccls_configuration_file_too() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("nccl.conf");
    fs::write(&file, "# a comment\nNCCL_SOCKET_IFNAME=nosuch\n").unwrap();
    let output = towline(SMALL).env("NCCL_CONF_FILE", &file).output().unwrap();
    assert_exit(&output, 1);
    let output = towline(&["doctor"]).env("NCCL_CONF_FILE", &file).output().unwrap();
    assert_exit(&output, 1);
    // What a file sets is taken away there: `unset` would do nothing.
    let cure = format!("sed -i '/^NCCL_SOCKET_IFNAME=/d' {}", file.display());
    assert!(out(&output).contains(&cure), "{}", out(&output));
    assert!(out(&output).contains(&format!("read from {}", file.display())), "{}", out(&output));
}

/// A long run whose results are lost at its end is the dearest way to learn of a wrong path.
#[test]
fn results_that_cannot_be_written_are_told_before_the_run() {
    for subcommand in ["all-reduce", "send-recv"] {
        let output = run(&[subcommand, "--json", "/nonexistent/out.json"]);
        assert_exit(&output, 1);
        assert!(err(&output).contains("writing /nonexistent/out.json failed"), "{}", err(&output));
        assert_eq!(out(&output), "", "it ran first");
    }
    // A run that fails for another reason leaves no empty file.
    let dir = tempfile::tempdir().unwrap();
    let json = dir.path().join("out.json");
    for subcommand in ["all-reduce", "send-recv"] {
        let output = run(&[subcommand, "--plugin", "/nonexistent.so", "--json", json.to_str().unwrap()]);
        assert_exit(&output, 1);
        assert!(!json.exists(), "{subcommand}");
    }
}

/// Standard output holds the JSON then and nothing else, for a program that reads it.
#[test]
fn json_on_standard_output_is_all_that_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let quick = ["send-recv", "-b", "8", "-e", "8", "--repetitions", "1", "--time", "5", "--json", "-"];
    let mut traced = towline(&["all-reduce", "-b", "8", "-e", "8", "-n", "2", "-w", "0", "--json", "-"]);
    traced.env("TOWLINE_PROFILE", "trace").env("TOWLINE_PROFILE_DIR", dir.path());
    for (output, table) in [(traced.output().unwrap(), "Out of bounds"), (run(&quick), "Wrong bytes")] {
        assert_exit(&output, 0);
        let json: serde_json::Value = serde_json::from_str(&out(&output)).expect("JSON and nothing else");
        assert_eq!(json["results"][0]["size"], 8);
        assert!(err(&output).contains(table), "{}", err(&output));
    }

    let trace = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path());
    let trace = trace.filter(|path| path.extension().is_some_and(|end| end == "pftrace")).min().expect("a trace");
    let trace = trace.to_str().unwrap();
    let output = run(&["trace", "report", trace, "--json", "-"]);
    assert_exit(&output, 0);
    let json: serde_json::Value = serde_json::from_str(&out(&output)).expect("JSON and nothing else");
    let calls = json["processes"][0]["communicators"][0]["calls"].as_array().expect("calls");
    assert!(calls.iter().any(|call| call["call"] == "AllReduce" && call["count"].as_u64() > Some(0)), "{json}");
    let output = run(&["trace", "check", trace, "--json", "-"]);
    assert_exit(&output, 0);
    let json: serde_json::Value = serde_json::from_str(&out(&output)).expect("JSON and nothing else");
    let process = &json["processes"][0];
    assert!(process["moved_bytes"].as_u64() > Some(0) && process["moved_bytes"] == process["carried_bytes"], "{json}");

    // To a file, the text comes too.
    let file = dir.path().join("report.json");
    let output = run(&["trace", "report", trace, "--json", file.to_str().unwrap()]);
    assert_exit(&output, 0);
    assert!(out(&output).contains("Towline profile"), "{}", out(&output));
    assert!(fs::read_to_string(&file).unwrap().contains("\"holds_back\""));
    let output = run(&["doctor", "--json", file.to_str().unwrap()]);
    assert!(out(&output).contains("Plugin (towline"), "{}", out(&output));
    assert!(fs::read_to_string(&file).unwrap().contains("\"findings\""));

    // A reader that has gone ends a command as SIGPIPE would; a full disk is told.
    for arguments in [&["trace", "report", trace][..], &["env"], &["doctor"], &["doctor", "--json"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output =
            towline(arguments).stdout(writer).stderr(Stdio::piped()).spawn().unwrap().wait_with_output().unwrap();
        assert_eq!((output.status.code(), err(&output).as_str()), (Some(141), ""), "{arguments:?}");
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output =
            towline(arguments).stdout(full).stderr(Stdio::piped()).spawn().unwrap().wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        assert!(err(&output).contains("writing to standard output failed"), "{arguments:?}: {}", err(&output));
    }
}

/// Directories may be called anything.
#[test]
fn names_that_are_no_utf8_are_taken_as_they_are() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let odd = dir.path().join(OsStr::from_bytes(b"od\xffd"));
    fs::create_dir(&odd).unwrap();
    let plugin = odd.join("libnccl-net.so");
    fs::copy(Path::new(env!("CARGO_BIN_EXE_towline")).with_file_name("libnccl-net.so"), &plugin).unwrap();
    let json = odd.join("out.json");
    let output = towline(SMALL).arg("--plugin").arg(&plugin).arg("--json").arg(&json).output().unwrap();
    assert_exit(&output, 0);
    assert!(fs::read_to_string(json).unwrap().contains("\"results\""));
    let output = towline(QUICK).arg("--plugin").arg(&plugin).output().unwrap();
    assert_exit(&output, 0);
    let output = towline(&["doctor", "--json", "--plugin"]).arg(&plugin).output().unwrap();
    assert!(
        serde_json::from_slice::<serde_json::Value>(&output.stdout)
            .is_ok_and(|json| json["plugin"]["name"] == "Towline")
    );

    let program = odd.join("towline");
    fs::copy(env!("CARGO_BIN_EXE_towline"), &program).unwrap();
    let output = Command::new(program).arg("env").output().unwrap();
    let line = [b"export LD_LIBRARY_PATH='", odd.as_os_str().as_bytes(), b"'"].concat();
    assert!(output.stdout.starts_with(&line), "{}", out(&output));

    for arguments in [&[&b"\xff"[..]][..], &[b"all-reduce", b"-b", b"\xff"], &[b"send-recv", b"--\xff"]] {
        let output = towline(&[]).args(arguments.iter().map(|word| OsStr::from_bytes(word))).output().unwrap();
        assert_exit(&output, 2);
        assert!(!err(&output).contains("panicked"), "{}", err(&output));
    }
}

/// Ctrl-C at a terminal reaches the program and its processes alike, and a signal from elsewhere the program alone.
/// Results that did not come leave no file, and none changed.
#[test]
fn an_interrupt_ends_the_program_and_its_processes() {
    let dir = tempfile::tempdir().unwrap();
    for (arguments, processes) in ENDLESS {
        let json = dir.path().join(arguments[0]);
        for (before, is_for_all) in [(None, true), (Some("of the last run"), false)] {
            if let Some(text) = before {
                fs::write(&json, text).unwrap();
            }
            let mut command = towline(arguments);
            command.arg("--json").arg(&json).process_group(0);
            let (mut run, children) = endless(command, processes);
            let id = run.0.id() as libc::pid_t;
            // SAFETY: a signal to a process that this test started, or to the group that it made.
            assert_eq!(unsafe { libc::kill(if is_for_all { -id } else { id }, libc::SIGINT) }, 0);
            assert_eq!(run.0.wait().unwrap().signal(), Some(libc::SIGINT), "{arguments:?}");
            await_gone(&children);
            assert_eq!(fs::read_to_string(&json).ok().as_deref(), before);
        }
    }
}

/// Runs the program with descriptors closed or sent elsewhere by the shell.
fn redirected(arguments: &[&str], redirection: &str) -> Output {
    let program = towline(arguments);
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(format!("exec \"$0\" \"$@\" {redirection}")).arg(program.get_program()).args(arguments);
    for (name, value) in program.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    shell.stdin(Stdio::null()).output().expect("a shell starts")
}

/// Results that nobody can see are no success. Rust's runtime opens /dev/null in place of a closed descriptor.
#[test]
fn a_closed_standard_output_is_told() {
    for arguments in [SMALL, QUICK, &["doctor"], &["env"], &["--version"], &["all-reduce", "--help"]] {
        let output = redirected(arguments, ">&-");
        assert_exit(&output, 1);
        assert!(err(&output).contains("standard output is closed"), "{arguments:?}: {}", err(&output));
        assert!(!err(&output).contains("rank"), "{arguments:?} ran: {}", err(&output));
        assert_eq!(redirected(arguments, "2>&-").status.code(), Some(0), "{arguments:?} without standard error");
        assert_eq!(redirected(arguments, "1<>/dev/null").status.code(), Some(0), "{arguments:?} for nobody to read");
        let output = redirected(arguments, ">/dev/full");
        assert_exit(&output, 1);
        assert!(err(&output).contains("writing to standard output failed"), "{arguments:?}: {}", err(&output));
    }
}

const QUICK: &[&str] = &["send-recv", "-b", "0", "-e", "0", "--repetitions", "2", "--time", "5"];

#[test]
fn send_recv_measures_plugin_and_plain_tcp_side_by_side() {
    let dir = tempfile::tempdir().unwrap();
    let json = dir.path().join("out.json");
    let arguments = ["send-recv", "-e", "4M", "-f", "512", "--repetitions", "2", "--time", "5", "--compare", "--json"];
    let output = run(&[&arguments[..], &[json.to_str().unwrap()]].concat());
    assert_exit(&output, 0);
    let rows = rows(&output);
    assert_eq!(rows.iter().map(|row| row[0].as_str()).collect::<Vec<_>>(), ["8", "4096", "2097152"]);
    assert!(rows.iter().all(|row| row.len() == 10 && row[5] == "0"), "{rows:?}");
    let json: serde_json::Value = serde_json::from_slice(&fs::read(json).unwrap()).unwrap();
    for way in ["plugin", "raw_tcp"] {
        assert_eq!(json["results"][2][way]["bandwidth_gbs"].as_array().unwrap().len(), 2);
        assert!(json["results"][0][way]["latency_us"][1].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn send_recv_measures_bandwidth_alone() {
    let output = run(&["send-recv", "-e", "64K", "--bandwidth", "--compare", "--repetitions", "1", "--time", "5"]);
    assert_exit(&output, 0);
    // Size, bandwidth, messages, wrong bytes, plain TCP's bandwidth, ratio.
    assert!(rows(&output).iter().all(|row| row.len() == 6 && row[3] == "0"), "{:?}", rows(&output));
    assert!(!out(&output).contains("latency"), "{}", out(&output));
}

#[test]
fn send_recv_measures_latency_with_receives_posted_ahead() {
    let sizes = ["-b", "1", "-e", "1M", "-f", "1024"];
    let output = run(&[&["send-recv", "--ahead", "--repetitions", "2", "--time", "5"], &sizes[..]].concat());
    assert_exit(&output, 0);
    // Size, outstanding, bandwidth, latency.
    assert!(rows(&output).iter().all(|row| row[3].parse::<f64>().is_ok_and(|us| us > 0.0)), "{:?}", rows(&output));
}

#[test]
fn send_recv_moves_empty_messages_and_runs_without_a_plugin() {
    assert_exit(&run(QUICK), 0);
    let output = run(&[
        "send-recv",
        "-e",
        "64K",
        "-f",
        "8192",
        "--repetitions",
        "1",
        "--time",
        "5",
        "--raw-tcp",
        "--plugin",
        "/nonexistent",
    ]);
    assert_exit(&output, 0);
    assert_eq!(rows(&output).len(), 2);
}

#[test]
fn send_recv_runs_between_hosts_and_shrugs_off_a_stranger() {
    let mut listening = Running::start(towline(&["send-recv", "--listen", "127.0.0.1:0"]));
    let mut said = BufReader::new(listening.0.stderr.take().unwrap()).lines();
    let first = said.next().unwrap().unwrap();
    let address = first.strip_prefix("towline: waiting on ").unwrap_or_else(|| panic!("{first}")).to_owned();

    let mut stranger = TcpStream::connect(&address).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let mut answer = String::new();
    let _ = stranger.read_to_string(&mut answer);
    assert!(answer.contains("towline's protocol"), "{answer}");
    assert!(said.next().unwrap().unwrap().contains("towline's protocol"));

    let arguments = ["send-recv", "-e", "64K", "-f", "8192", "--repetitions", "1", "--time", "5", "--compare"];
    let output = run(&[&arguments[..], &["--connect", &address]].concat());
    assert_exit(&output, 0);
    assert_eq!(rows(&output).len(), 2);
    assert_eq!(listening.0.wait().unwrap().code(), Some(0));
}

#[test]
fn doctor_shows_the_host_as_text_and_as_json() {
    let output = run(&["doctor"]);
    let text = out(&output);
    for heading in ["Plugin", "Interfaces", "RDMA", "Limits", "NCCL libraries", "Settings"] {
        assert!(text.lines().any(|line| line.starts_with(heading)), "{heading}:\n{text}");
    }
    let last = text.lines().last().unwrap_or_default();
    assert!(last.starts_with("No problem found: ") || last.contains(" found; "), "the verdict stands last:\n{text}");
    assert!(!text.contains("\u{1b}"), "colours are for terminals");
    assert!(text.contains("device 0: "), "{text}");
    let output = run(&["doctor", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&out(&output)).expect("JSON and nothing else");
    // On a screen: all of a host with one interface, one setting, two findings, no RDMA and no NCCL. What another has
    // more of takes lines of its own.
    let number = |list: &str| json.pointer(list).and_then(serde_json::Value::as_array).expect("a list").len();
    let used =
        json["interfaces"]["list"].as_array().unwrap().iter().filter(|interface| interface["used"] == true).count();
    let rdma =
        text.lines().skip_while(|line| !line.starts_with("RDMA")).skip(1).take_while(|line| line.starts_with(' '));
    let settings: usize = ["files", "set", "others"].map(|list| number(&format!("/settings/{list}"))).iter().sum();
    let more = [number("/plugin/devices"), used, settings].map(|number| number.saturating_sub(1)).iter().sum::<usize>()
        + 2 * number("/findings").saturating_sub(2)
        + number("/nccl")
        + rdma.count();
    let lines = text.lines().count();
    assert!(lines <= 24 + more, "{lines} lines, {more} of them for what few hosts have:\n{text}");
    assert_eq!(json["plugin"]["name"], "Towline");
    assert_eq!(json["plugin"]["versions"].as_array().unwrap().len(), 9);
    assert!(json["interfaces"]["list"].as_array().unwrap().iter().any(|interface| interface["used"] == true));
    assert!(json["limits"]["descriptors"]["soft"].as_u64().unwrap_or(u64::MAX) > 0);
}

/// Started as a process of a job would be, it tells what part of the cores that takes for its own.
#[test]
fn doctor_tells_a_process_its_part_of_the_cores() {
    let doctor = |processes: &str| {
        let output = towline(&["doctor", "--json"]).env("LOCAL_WORLD_SIZE", processes).output().unwrap();
        let json: serde_json::Value = serde_json::from_str(&out(&output)).expect("JSON and nothing else");
        ["cores", "own_cores"].map(|name| json["limits"][name].as_u64().unwrap())
    };
    let [cores, own] = doctor("100000");
    assert_eq!(own, 1);
    assert!(doctor("1")[1] >= cores.min(2));
    let output = towline(&["doctor"]).env("LOCAL_WORLD_SIZE", "100000").output().unwrap();
    let shared = format!("{cores}, 1 for each process of the job");
    assert!(cores == 1 || out(&output).contains(&shared), "{}", out(&output));
}

#[test]
fn doctor_names_the_cure() {
    let output = towline(&["doctor"]).env("NCCL_NET", "Socket").env("TOWLINE_STREAM", "2").output().unwrap();
    assert_exit(&output, 1);
    let text = out(&output);
    assert!(text.contains("export NCCL_NET=Towline"), "{text}");
    assert!(text.contains("TOWLINE_STREAMS"), "{text}");
}

//! Checksums and encryption, through the built library: what is changed on the way never reaches a buffer and travels
//! again, nobody reads along, and two sides that do not fit together both say so.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::support::child::{self, Guarded, MAILBOX, Mailbox};
use crate::support::pair::Pair;
use crate::support::proxy::{Proxy, Way};
use crate::support::{PATIENCE, context, eventually, outcome, part, pattern, versions, watchdog};
use towline::host::log::Capture;
use towline::host::{ApiVersion, Code, Context, Handle, Memory, Part};

/// Bytes of the handshake on each way, without and with encryption; the last 8 forth are the connection's number.
const FORTH: [usize; 2] = [16 + 512 + 8, 16 + 512 + 48 + 8];
const BACK: [usize; 2] = [32 + 496, 32 + 496 + 48];

/// A key file for one test.
struct KeyFile {
    _dir: tempfile::TempDir,
    path: String,
}

fn key_file(content: &str) -> KeyFile {
    let (dir, path) = crate::support::key_file_of(content.as_bytes());
    KeyFile { _dir: dir, path: path.to_string_lossy().into_owned() }
}

const KEY: &str = "the quick brown fox jumps over the lazy dog";

/// Runs `body(encrypted)` in two processes of their own: with checksums, and with encryption.
fn in_both_modes(name: &str, also: &[(&str, &str)], body: impl Fn(bool)) {
    if child::role().as_deref() == Some("alone") {
        return body(std::env::var_os("TOWLINE_KEY_FILE").is_some());
    }
    let key = key_file(KEY);
    for mode in [("TOWLINE_CHECKSUM", "1"), ("TOWLINE_KEY_FILE", key.path.as_str())] {
        let variables: Vec<_> = also.iter().copied().chain([mode]).collect();
        child::alone(name, &variables, || ());
    }
}

/// A connection of which an observer sees the first epoch of the first stream.
fn pair_through(meddle: impl FnMut(Way, usize, &mut [u8]) + Send + 'static) -> (Pair, Proxy, Handle) {
    let context = context(ApiVersion::V12);
    let (listener, mut handle) = context.listen(0).expect("listen");
    let proxy = Proxy::before(&mut handle, meddle);
    let pair = Pair::through(&listener, (&context, 0), &mut handle).expect("a connection");
    (pair, proxy, handle)
}

/// Flips a bit of the byte at `at`, once.
fn flip(way: Way, at: usize) -> impl FnMut(Way, usize, &mut [u8]) {
    let mut done = false;
    move |this, from, bytes| {
        if this == way && !done && (from..from + bytes.len()).contains(&at) {
            bytes[at - from] ^= 0x10;
            done = true;
        }
    }
}

#[test]
fn every_kind_of_message_arrives_through_every_version() {
    in_both_modes("seal::every_kind_of_message_arrives_through_every_version", &[], |_| {
        let _watchdog = watchdog(60);
        for version in versions() {
            let pair = crate::support::pair(version);
            for size in [0, 1, 127, 4096, 65_536, 65_537, 300_000, 3 << 20] {
                let sent = pattern(size, size);
                assert!(pair.transfer(sent).expect("a transfer") == sent, "{version}: {size} bytes");
            }
            // Early: the sends come before their receives.
            let target = Memory::new(60_000);
            // SAFETY: memory and pattern outlive the requests.
            unsafe {
                let sends = [1, 2].map(|seed| pair.send.post(part(pattern(seed, 60_000), None)).expect("isend"));
                for (seed, send) in (1..).zip(sends) {
                    let receive = pair.recv.post(&[Part::all(&target, None)]).expect("irecv");
                    pair.finish(receive, &[send]).expect("a transfer");
                    assert!(target.bytes() == pattern(seed, 60_000), "{version}");
                }
            }
            pair.close().expect("close");
        }
    });
}

#[test]
fn many_streams_move_long_messages() {
    in_both_modes("seal::many_streams_move_long_messages", &[("TOWLINE_STREAMS", "5")], |_| {
        let _watchdog = watchdog(60);
        let pair = crate::support::pair(ApiVersion::V12);
        for seed in 0..6 {
            let sent = pattern(seed, 9_000_001);
            assert!(pair.transfer(sent).expect("a transfer") == sent);
        }
        // Workers also send short messages whose receives are announced.
        for _ in 0..20 {
            let targets: [Memory; 4] = std::array::from_fn(|_| Memory::new(1 << 20));
            // SAFETY: memory and pattern outlive the requests.
            unsafe {
                let receives = targets.each_ref().map(|of| pair.recv.post(&[Part::all(of, None)]).expect("irecv"));
                std::thread::sleep(std::time::Duration::from_millis(2));
                let sends = [1, 2, 3, 4].map(|seed| pair.send.post(part(pattern(seed, 60_000), None)).expect("isend"));
                for (receive, send) in receives.into_iter().zip(sends) {
                    pair.finish(receive, &[send]).expect("a transfer");
                }
            }
            assert!((1..).zip(&targets).all(|(seed, target)| target.bytes()[..60_000] == *pattern(seed, 60_000)));
        }
    });
}

#[test]
fn what_is_damaged_on_the_way_travels_again() {
    let also = [("TOWLINE_STREAMS", "1"), ("NCCL_DEBUG", "TRACE")];
    in_both_modes("seal::what_is_damaged_on_the_way_travels_again", &also, |encrypted| {
        let _watchdog = watchdog(60);
        let forth = FORTH[usize::from(encrypted)];
        let back = BACK[usize::from(encrypted)];
        // The header of the first frame, its payload, its last bytes, a later frame; the first answer.
        let places = [
            (Way::Forth, forth + 5),
            (Way::Forth, forth + 47),
            (Way::Forth, forth + 70),
            (Way::Forth, forth + 48 + 900),
            (Way::Forth, forth + 48 + 1001),
            (Way::Forth, forth + 60_000),
            (Way::Back, back + 9),
            (Way::Back, back + 44),
        ];
        for (way, at) in places {
            let log = Capture::start();
            let (pair, _proxy, _) = pair_through(flip(way, at));
            for (seed, size) in [(1, 1000), (2, 200_000), (3, 64), (4, 70_000), (5, 40_000)] {
                let sent = pattern(seed, size);
                assert!(pair.transfer(sent).expect("a transfer") == sent, "{way:?} {at}: {size} bytes");
            }
            // The closes write the counters.
            pair.close().expect("close");
            assert!(log.contains(", 1 arrived damaged"), "{way:?} {at}: {:?}", log.records());
        }
    });
}

/// The comparison for the others: without either, damage is not noticed.
#[test]
fn without_checksums_a_flipped_bit_arrives() {
    child::alone("seal::without_checksums_a_flipped_bit_arrives", &[("TOWLINE_STREAMS", "1")], || {
        let _watchdog = watchdog(30);
        let (pair, _proxy, _) = pair_through(flip(Way::Forth, FORTH[0] + 48 + 900));
        let got = pair.transfer(pattern(1, 1000)).expect("a transfer");
        assert_eq!(got.iter().zip(pattern(1, 1000)).filter(|(a, b)| a != b).count(), 1);
    });
}

/// Posts a receive of `size` bytes and sends as many: how the receive ends, and sending, of which the first may be done
/// when the kernel took it.
fn ends(pair: &Pair, target: &Memory, size: usize) -> [Option<Code>; 2] {
    // SAFETY: the memory and the pattern outlive the connection.
    let receive = unsafe { pair.recv.post(&[Part::all(target, None)]) }.expect("irecv");
    let mut both = [None, None];
    let mut sending = None;
    eventually("both sides end", PATIENCE, || {
        both[0] = both[0].or_else(|| pair.recv.test(&receive).err());
        if both[1].is_none() {
            let tested = match &sending {
                // SAFETY: as above.
                None => unsafe { pair.send.isend(part(pattern(1, size), None)) }.map(|request| sending = request),
                Some(request) => pair.send.test(request).map(|done| {
                    if done.is_some() {
                        sending = None;
                    }
                }),
            };
            both[1] = tested.err();
        }
        both.iter().all(Option::is_some).then_some(())
    });
    both
}

#[test]
fn without_recovery_damage_ends_the_connection_and_nothing_damaged_is_in_the_buffer() {
    const NAME: &str = "seal::without_recovery_damage_ends_the_connection_and_nothing_damaged_is_in_the_buffer";
    in_both_modes(NAME, &[("TOWLINE_STREAMS", "1"), ("TOWLINE_RECOVERY", "0")], |encrypted| {
        let _watchdog = watchdog(30);
        let log = Capture::start();
        // Towards the end of the only chunk.
        let (pair, _proxy, _) = pair_through(flip(Way::Forth, FORTH[usize::from(encrypted)] + 69_000));
        let mut target = Memory::new(70_000);
        target.bytes_mut().fill(0xA5);
        assert_eq!(ends(&pair, &target, 70_000), [Some(Code::RemoteError); 2]);
        assert!(target.bytes().iter().all(|byte| *byte == 0xA5), "not a byte of the chunk was placed");
        let said = "data arrived damaged or was changed on its way (its checksum or tag is wrong)";
        assert!(log.records().iter().any(|record| record.is_warning() && record.text.contains(said)));
        assert!(log.contains("TOWLINE_RECOVERY=1"));
        assert!(log.contains("the peer gave up the connection: data arrived damaged"), "{:?}", log.records());
    });
}

#[test]
fn no_byte_is_in_the_buffer_before_its_whole_chunk_was_checked() {
    const NAME: &str = "seal::no_byte_is_in_the_buffer_before_its_whole_chunk_was_checked";
    in_both_modes(NAME, &[("TOWLINE_STREAMS", "1")], |encrypted| {
        let _watchdog = watchdog(30);
        // The last kilobytes of the chunk wait until they are let through.
        let (open, held) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let end = FORTH[usize::from(encrypted)] + 69_000;
        let (gate, waits) = (Arc::clone(&open), Arc::clone(&held));
        let (pair, _proxy, _) = pair_through(move |way, from, bytes| {
            if way == Way::Forth && from + bytes.len() > end {
                waits.store(true, Ordering::SeqCst);
                while !gate.load(Ordering::SeqCst) {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        });
        let mut target = Memory::new(70_000);
        target.bytes_mut().fill(0xA5);
        // SAFETY: memory and pattern outlive the requests.
        let (receive, send) = unsafe {
            let receive = pair.recv.post(&[Part::all(&target, None)]).expect("irecv");
            (receive, pair.send.post(part(pattern(1, 70_000), None)).expect("isend"))
        };
        let start = Instant::now();
        let mut since = None;
        while since.is_none_or(|since: Instant| since.elapsed() < Duration::from_millis(200)) {
            assert!(start.elapsed() < PATIENCE);
            assert!(pair.recv.test(&receive).expect("no failure").is_none());
            assert!(pair.send.test(&send).expect("no failure").is_none());
            if held.load(Ordering::SeqCst) {
                since.get_or_insert(Instant::now());
            }
            assert!(target.bytes().iter().all(|byte| *byte == 0xA5), "a byte was placed too early");
        }
        open.store(true, Ordering::SeqCst);
        pair.finish(receive, &[send]).expect("a transfer");
        assert!(target.bytes() == pattern(1, 70_000));
    });
}

/// The streams that come back go round the proxy, so what is damaged once is whole the second time.
#[test]
fn an_epoch_in_which_everything_is_damaged_is_followed_by_a_whole_one() {
    const NAME: &str = "seal::an_epoch_in_which_everything_is_damaged_is_followed_by_a_whole_one";
    in_both_modes(NAME, &[("TOWLINE_STREAMS", "1")], |encrypted| {
        let _watchdog = watchdog(60);
        let (pair, _proxy, _) = pair_through(move |way, from, bytes| {
            let behind_handshake = FORTH[usize::from(encrypted)].saturating_sub(from).min(bytes.len());
            if way == Way::Forth {
                bytes[behind_handshake..].iter_mut().for_each(|byte| *byte ^= 1);
            }
        });
        assert!(pair.transfer(pattern(1, 500_000)).expect("a transfer") == pattern(1, 500_000));
    });
}

fn occurs(part: &[u8], whole: &[u8]) -> bool {
    whole.windows(part.len()).any(|window| window == part)
}

#[test]
fn what_travels_encrypted_cannot_be_read_and_no_secret_is_ever_shown() {
    const NAME: &str = "seal::what_travels_encrypted_cannot_be_read_and_no_secret_is_ever_shown";
    let look = |encrypted: bool| {
        let _watchdog = watchdog(30);
        let log = Capture::start();
        let (pair, proxy, handle) = pair_through(|_, _, _| ());
        let secret = handle.bytes()[8..24].to_vec();
        for (seed, size) in [(1, 1000), (2, 100_000)] {
            assert!(pair.transfer(pattern(seed, size)).expect("a transfer") == pattern(seed, size));
        }
        pair.close().expect("close");
        let (forth, back) = (proxy.seen(Way::Forth), proxy.seen(Way::Back));
        assert!(forth.len() > 101_000 && back.len() > 500);
        for (what, wire) in [("forth", &forth), ("back", &back)] {
            assert!(!occurs(&secret, wire) && !occurs(&secret[..8], wire), "{what}: the handle's secret");
            assert!(!occurs(KEY.as_bytes(), wire), "{what}: the key");
        }
        for at in [0, 100, 984] {
            assert_eq!(occurs(&pattern(1, 1000)[at..at + 16], &forth), !encrypted, "a short message at {at}");
        }
        for at in [0, 50_000, 99_984] {
            assert_eq!(occurs(&pattern(2, 100_000)[at..at + 16], &forth), !encrypted, "a long message at {at}");
        }
        let hex: String = secret.iter().map(|byte| format!("{byte:02x}")).collect();
        let decimal = format!("{:?}", &secret[..6]);
        assert!(log.contains("closed the connection to"), "even what only a developer sees");
        for record in log.records() {
            let text = record.text.to_lowercase();
            assert!(!text.contains(&hex[..12]) && !text.contains(KEY), "{text}");
            assert!(!text.contains(decimal.trim_end_matches(']')), "{text}");
        }
    };
    // Everything that could be logged is.
    let also = [("TOWLINE_STREAMS", "1"), ("NCCL_DEBUG", "TRACE")];
    if child::role().is_none() {
        child::alone(NAME, &also, || ());
    }
    in_both_modes(NAME, &also, look);
}

#[test]
fn nobody_on_the_way_can_talk_the_two_out_of_encryption() {
    const NAME: &str = "seal::nobody_on_the_way_can_talk_the_two_out_of_encryption";
    let key = key_file(KEY);
    child::alone(NAME, &[("TOWLINE_KEY_FILE", &key.path), ("TOWLINE_CONNECT_TIMEOUT", "1")], || {
        let _watchdog = watchdog(60);
        let context = context(ApiVersion::V12);
        // The feature bits of either side's first word, and any byte of what follows.
        for (way, at) in [(Way::Forth, 12), (Way::Back, 12), (Way::Forth, 16 + 20), (Way::Forth, 150), (Way::Back, 100)]
        {
            let (listener, mut handle) = context.listen(0).expect("listen");
            let _proxy = Proxy::before(&mut handle, move |this, from, bytes| {
                if this == way && (from..from + bytes.len()).contains(&at) {
                    bytes[at - from] ^= 4;
                }
            });
            let refused = context.connect_within(0, &mut handle, PATIENCE).err();
            assert!(matches!(refused, Some(Code::RemoteError | Code::InvalidUsage)), "{way:?} {at}: {refused:?}");
            // A listening side whose last word was changed cannot know.
            if (way, at) != (Way::Back, 100) {
                assert!(!matches!(listener.accept(), Ok(Some(_))), "{way:?} {at}");
            }
        }
    });
}

/// The process that connects: says what came of it.
fn connecting_process() {
    let _watchdog = watchdog(60);
    let log = Capture::start();
    let mailbox = child::mailbox();
    let bytes = child::receive(&mailbox, "handle");
    let context = context(ApiVersion::V12);
    let result = context.connect_within(0, &mut Handle::from_bytes(&bytes), PATIENCE);
    let warnings: Vec<String> =
        log.records().iter().filter(|record| record.is_warning()).map(|record| record.text.clone()).collect();
    match result {
        Err(code) => child::send(&mailbox, "result", format!("{code:?}\n{}", warnings.join("\n")).as_bytes()),
        Ok(send) => {
            child::send(&mailbox, "result", b"connected");
            // SAFETY: the pattern is static.
            let request = unsafe { send.post(part(pattern(1, 200_000), None)) }.expect("isend");
            outcome(|request| send.test(request), request, PATIENCE).expect("in time").expect("it is sent");
            send.close().expect("close");
        }
    }
}

/// A listening process with `ours`, and a connecting one with `theirs`; `check` sees the listening side's result and
/// warnings, and what the other reports.
fn between_processes(
    name: &str,
    ours: &[(&str, &str)],
    theirs: &[(&str, &str)],
    meddle: Option<usize>,
    version: ApiVersion,
    check: impl Fn(Result<(), Code>, &Capture, &str),
) {
    match child::role().as_deref() {
        Some("connecting") => connecting_process(),
        Some("alone") => {
            let _watchdog = watchdog(60);
            let log = Capture::start();
            let mailbox = Path::new(&std::env::var_os(MAILBOX).expect("the test gave a mailbox")).to_path_buf();
            let context = context(version);
            let (listener, mut handle) = context.listen(0).expect("listen");
            let _proxy = meddle.map(|at| Proxy::before(&mut handle, flip(Way::Forth, at)));
            child::send(&mailbox, "handle", handle.bytes());
            let accepted = if version.setup_blocks() {
                listener.accept().map(|recv| recv.expect("a connection or a failure"))
            } else {
                listener.accept_within(PATIENCE)
            };
            let result = accepted.map(|recv| {
                let target = Memory::new(200_000);
                // SAFETY: the memory outlives the request.
                let request = unsafe { recv.post(&[Part::all(&target, None)]) }.expect("irecv");
                outcome(|request| recv.test(request), request, PATIENCE).expect("in time").expect("it arrives");
                assert!(target.bytes() == pattern(1, 200_000));
            });
            check(result, &log, &String::from_utf8_lossy(&child::receive(&mailbox, "result")));
        }
        _ => {
            let mailbox = Mailbox::new();
            let mut connecting = child::command(name, "connecting");
            connecting.env(MAILBOX, mailbox.path()).envs(theirs.iter().copied());
            let mut connecting = Guarded::start(connecting);
            let path = mailbox.path().to_string_lossy().into_owned();
            let variables: Vec<_> = ours.iter().copied().chain([(MAILBOX, path.as_str())]).collect();
            child::alone(name, &variables, || ());
            assert!(connecting.passed_within(PATIENCE), "{name}: the connecting process failed");
        }
    }
}

/// Both sides fail at once with the same kind of error, and say what to do.
fn both_say(here: &'static str, there: &'static str) -> impl Fn(Result<(), Code>, &Capture, &str) {
    move |result, log, report| {
        assert_eq!(result, Err(Code::InvalidUsage));
        let said = |text: &str| text.contains(here) && text.contains("TOWLINE_KEY_FILE") && text.contains("peer ");
        assert!(log.records().iter().any(|it| it.is_warning() && said(&it.text)), "{:?}", log.records());
        assert!(report.starts_with("InvalidUsage"), "{report}");
        assert!(report.contains(there) && report.contains("TOWLINE_KEY_FILE") && report.contains("peer "), "{report}");
    }
}

const MINE: &str = "this side encrypts its connections (TOWLINE_KEY_FILE) and the peer does not";
const YOURS: &str = "the peer encrypts its connections (TOWLINE_KEY_FILE) and this side does not";
const OTHER: &str = "the peer's key (TOWLINE_KEY_FILE) is not the same as this side's";

#[test]
fn a_key_on_the_listening_side_only_is_told_by_both() {
    let key = key_file(KEY);
    let ours = [("TOWLINE_KEY_FILE", key.path.as_str())];
    let name = "seal::a_key_on_the_listening_side_only_is_told_by_both";
    between_processes(name, &ours, &[], None, ApiVersion::V12, both_say(MINE, YOURS));
}

#[test]
fn a_key_on_the_connecting_side_only_is_told_by_both() {
    let key = key_file(KEY);
    let theirs = [("TOWLINE_KEY_FILE", key.path.as_str())];
    let name = "seal::a_key_on_the_connecting_side_only_is_told_by_both";
    between_processes(name, &[], &theirs, None, ApiVersion::V12, both_say(YOURS, MINE));
}

#[test]
fn two_different_keys_are_told_by_both() {
    let (ours, theirs) = (key_file(KEY), key_file("the quick brown fox jumps over the lazy cat"));
    let (ours, theirs) = ([("TOWLINE_KEY_FILE", ours.path.as_str())], [("TOWLINE_KEY_FILE", theirs.path.as_str())]);
    let name = "seal::two_different_keys_are_told_by_both";
    between_processes(name, &ours, &theirs, None, ApiVersion::V12, both_say(OTHER, OTHER));
}

/// NCCL 2.8 to 2.11 wait inside `accept`: it must not wait for what cannot come.
#[test]
fn two_different_keys_end_an_accept_that_waits() {
    let (ours, theirs) = (key_file(KEY), key_file("the quick brown fox jumps over the lazy cat"));
    let (ours, theirs) = ([("TOWLINE_KEY_FILE", ours.path.as_str())], [("TOWLINE_KEY_FILE", theirs.path.as_str())]);
    let name = "seal::two_different_keys_end_an_accept_that_waits";
    between_processes(name, &ours, &theirs, None, ApiVersion::V4, both_say(OTHER, OTHER));
}

#[test]
fn the_same_key_with_another_line_end_connects() {
    let (ours, theirs) = (key_file(KEY), key_file(&format!("{KEY}\n")));
    let (ours, theirs) = ([("TOWLINE_KEY_FILE", ours.path.as_str())], [("TOWLINE_KEY_FILE", theirs.path.as_str())]);
    between_processes(
        "seal::the_same_key_with_another_line_end_connects",
        &ours,
        &theirs,
        None,
        ApiVersion::V12,
        |result, _, report| {
            assert_eq!((result, report), (Ok(()), "connected"));
        },
    );
}

fn recovered(result: Result<(), Code>, log: &Capture, report: &str) {
    assert_eq!((result, report), (Ok(()), "connected"));
    assert!(log.contains("it travels again"), "{:?}", log.records());
}

#[test]
fn checksums_are_on_when_the_listening_side_asks() {
    let ours = [("TOWLINE_CHECKSUM", "1"), ("TOWLINE_STREAMS", "1")];
    let name = "seal::checksums_are_on_when_the_listening_side_asks";
    between_processes(name, &ours, &[("TOWLINE_STREAMS", "1")], Some(FORTH[0] + 5000), ApiVersion::V12, recovered);
}

#[test]
fn checksums_are_on_when_the_connecting_side_asks() {
    let theirs = [("TOWLINE_CHECKSUM", "1"), ("TOWLINE_STREAMS", "1")];
    let name = "seal::checksums_are_on_when_the_connecting_side_asks";
    between_processes(name, &[("TOWLINE_STREAMS", "1")], &theirs, Some(FORTH[0] + 5000), ApiVersion::V12, recovered);
}

/// NCCL disables a plugin whose `init` fails or that has no device, and goes on with a network of its own, in clear. So
/// both succeed, and nothing connects.
fn connects_to_nobody(context: &Context, expected: &str) {
    assert!(context.devices().expect("devices") >= 1, "{expected}");
    assert!(!context.properties(0).expect("properties").name.is_empty(), "{expected}");
    let refused = |result: Result<(), Code>| matches!(result, Err(Code::InvalidUsage | Code::SystemError));
    assert!(refused(context.listen(0).map(drop)), "{expected}");
    assert!(refused(context.connect(0, &mut Handle::from_bytes(&[1; 64])).map(drop)), "{expected}");
}

/// The job ran over NCCL's own sockets, in clear, although `TOWLINE_KEY_FILE` was set, because `init` failed.
#[test]
fn with_a_key_that_cannot_be_used_nccl_stays_with_the_plugin_and_nothing_connects() {
    const NAME: &str = "seal::with_a_key_that_cannot_be_used_nccl_stays_with_the_plugin_and_nothing_connects";
    let refused = || {
        let log = Capture::start();
        let expected = std::env::var("EXPECTED").expect("the test says what to expect");
        for version in [ApiVersion::V4, ApiVersion::V8, ApiVersion::V12] {
            let context = crate::support::net(version).init().expect("init");
            connects_to_nobody(&context, &expected);
            connects_to_nobody(&crate::support::net(version).init().expect("init again"), &expected);
        }
        let said = |text: &str| text.contains("no connections will be made") && text.contains(&expected);
        assert!(log.records().iter().any(|it| it.is_warning() && said(&it.text)), "{expected}: {:?}", log.records());
        assert!(log.records().iter().all(|it| !it.text.contains("fox")));
    };
    let (short, open, good) = (key_file("short"), key_file(KEY), key_file(KEY));
    let chmod = |key: &KeyFile, mode| {
        let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
        std::fs::set_permissions(&key.path, mode).expect("the file is ours");
    };
    chmod(&open, 0o644);
    let missing = format!("{}.missing", good.path);
    let directory = Path::new(&good.path).parent().and_then(Path::to_str).expect("text").to_owned();
    let cases: [(&str, (&str, &str), &str); 8] = [
        (&missing, ("", ""), "reading the key file"),
        (&directory, ("", ""), "key file"),
        (&short.path, ("", ""), "must hold 32 to 4096 bytes"),
        (&open.path, ("", ""), "can be used or changed by others (mode 644)"),
        (&open.path, ("", ""), "`defaultMode: 0400`"),
        ("", ("", ""), "TOWLINE_KEY_FILE is set, but names no file"),
        (&good.path, ("TOWLINE_BACKEND", "rdma"), "RDMA backend"),
        (&good.path, ("NCCL_SOCKET_IFNAME", "=nosuch0"), "NCCL_SOCKET_IFNAME"),
    ];
    for (path, also, expected) in cases {
        let variables = [("TOWLINE_KEY_FILE", path), ("EXPECTED", expected), also];
        let used = if also.0.is_empty() { 2 } else { 3 };
        child::alone(NAME, &variables[..used], refused);
    }
}

/// NCCL may not count the devices again, and then asks the stand-in to connect.
#[test]
fn a_process_whose_first_init_found_no_interface_connects_after_one_that_does() {
    const NAME: &str = "seal::a_process_whose_first_init_found_no_interface_connects_after_one_that_does";
    let key = key_file(KEY);
    for version in ["12", "8"] {
        let variables = [("TOWLINE_KEY_FILE", key.path.as_str()), ("VERSION", version)];
        child::alone(NAME, &variables, || {
            let is_newest = std::env::var("VERSION").is_ok_and(|version| version == "12");
            let net = crate::support::net(if is_newest { ApiVersion::V12 } else { ApiVersion::V8 });
            set("NCCL_SOCKET_IFNAME", Some("=nosuch0"));
            // NCCL keeps it until the communicator is destroyed.
            let refusing = net.init().expect("init");
            connects_to_nobody(&refusing, "no interface");
            set("NCCL_SOCKET_IFNAME", Some("lo"));
            let context = net.init().expect("init again");
            let pair = Pair::connect(&context, 0).expect("a connection");
            assert!(pair.transfer(pattern(1, 1000)).expect("a transfer") == pattern(1, 1000));
            drop(refusing);
        });
        if child::role().is_some() {
            return;
        }
    }
}

/// Sets or removes a variable of this process.
fn set(name: &str, value: Option<&str>) {
    // SAFETY: a child that runs one test; its other threads, the transport's, read no variables.
    unsafe { value.map_or_else(|| std::env::remove_var(name), |value| std::env::set_var(name, value)) }
}

#[test]
fn a_key_that_comes_or_changes_after_the_first_init_is_not_passed_over() {
    const NAME: &str = "seal::a_key_that_comes_or_changes_after_the_first_init_is_not_passed_over";
    let (key, same, other) = (key_file(KEY), key_file(KEY), key_file("the quick brown fox jumps over the lazy cat"));
    let first = [[("FIRST", "")].as_slice(), &[("FIRST", "key"), ("TOWLINE_KEY_FILE", &key.path)]];
    for (variables, version) in first.into_iter().flat_map(|first| [(first, "v8"), (first, "v12")]) {
        let files = [("SAME", same.path.as_str()), ("OTHER", &other.path), ("VERSION", version)];
        let variables: Vec<_> = variables.iter().copied().chain(files).collect();
        child::alone(NAME, &variables, || {
            let variable = |name: &str| std::env::var(name).expect("the test sets it");
            let version = variable("VERSION").parse().expect("a version");
            let init = || crate::support::net(version).init().expect("init");
            let before = init();
            before.listen(0).expect("the first context connects");
            if variable("FIRST").is_empty() {
                set("TOWLINE_KEY_FILE", Some(&variable("SAME")));
                connects_to_nobody(&init(), "was set after the process began to connect");
                set("TOWLINE_KEY_FILE", Some(""));
                connects_to_nobody(&init(), "was set after the process began to connect");
                set("TOWLINE_KEY_FILE", None);
            } else {
                set("TOWLINE_KEY_FILE", Some(&variable("OTHER")));
                connects_to_nobody(&init(), "was changed to another key");
                set("TOWLINE_KEY_FILE", Some(&variable("SAME")));
            }
            init().listen(0).expect("what fits the first context connects");
            before.listen(0).expect("the first context still connects");
        });
    }
}

//! NCCL's logger, played by the host: what a plugin prints becomes [`Record`]s.
//!
//! NCCL hands plugins a C function with printf's variable arguments, which stable Rust cannot define. So the function
//! here has a fixed list instead: the five declared arguments, then as many integer and floating-point ones as fit
//! the registers and a few stack slots. On Linux for x86-64 and aarch64 a variadic call passes its arguments exactly as
//! a call to such a function does, each kind in its own order. So the right number of each can be taken while walking
//! through the format.
//!
//! Limits: at most 12 integer or pointer arguments and 8 floating-point ones (further conversions are shown as
//! written), no `long double`, no `%n` and no positional arguments (`%1$s`). Reading a slot that the caller did not
//! fill yields a meaningless number, never a fault: it lies in the caller's own stack frame.
//!
//! Guarantees: whatever the format, this never fails and never calls back into the plugin.

use std::ffi::{CStr, CString, c_char, c_int, c_ulong};
use std::fmt;
use std::io::Write;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::nccl::ffi;

/// One line that a plugin printed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// `NCCL_LOG_WARN`, `NCCL_LOG_INFO`, …
    pub level: u32,
    /// The subsystem bits.
    pub flags: u64,
    /// The source file that the plugin named.
    pub file: String,
    /// The line in it.
    pub line: i32,
    /// The finished text.
    pub text: String,
}

impl Record {
    /// Whether it is a warning.
    pub fn is_warning(&self) -> bool {
        self.level == ffi::NCCL_LOG_WARN
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let level = match self.level {
            ffi::NCCL_LOG_WARN => "WARN",
            ffi::NCCL_LOG_INFO => "INFO",
            ffi::NCCL_LOG_TRACE => "TRACE",
            ffi::NCCL_LOG_VERSION => "VERSION",
            ffi::NCCL_LOG_ABORT => "ABORT",
            _ => "LOG",
        };
        write!(f, "{level} {}", self.text)
    }
}

type Sink = Arc<dyn Fn(&Record) + Send + Sync>;

static SINKS: Mutex<Vec<(u64, Sink)>> = Mutex::new(Vec::new());

/// Receives every line that any plugin in this process prints through [`logger`], until it is dropped. NCCL's logger
/// has no user data, so neither has ours: tests that run side by side see each other's lines.
#[must_use = "it stops when dropped"]
pub struct Subscription(u64);

/// Calls `sink` for each line. The sink runs in the plugin's threads and must not call the plugin.
pub fn subscribe(sink: impl Fn(&Record) + Send + Sync + 'static) -> Subscription {
    static NEXT: Mutex<u64> = Mutex::new(0);
    let mut next = NEXT.lock().unwrap_or_else(PoisonError::into_inner);
    *next += 1;
    SINKS.lock().unwrap_or_else(PoisonError::into_inner).push((*next, Arc::new(sink)));
    Subscription(*next)
}

impl Drop for Subscription {
    fn drop(&mut self) {
        SINKS.lock().unwrap_or_else(PoisonError::into_inner).retain(|(id, _)| *id != self.0);
    }
}

/// Collects lines: what a test usually wants.
pub struct Capture {
    records: Arc<Mutex<Vec<Record>>>,
    _subscription: Subscription,
}

impl Capture {
    /// Starts to collect.
    #[must_use]
    pub fn start() -> Self {
        let records = Arc::new(Mutex::new(Vec::new()));
        let to = Arc::clone(&records);
        let subscription =
            subscribe(move |record| to.lock().unwrap_or_else(PoisonError::into_inner).push(record.clone()));
        Self { records, _subscription: subscription }
    }

    /// What came so far.
    pub fn records(&self) -> Vec<Record> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether a line contains `text`.
    pub fn contains(&self, text: &str) -> bool {
        self.records().iter().any(|record| record.text.contains(text))
    }
}

/// Prints the messages of plugins to standard error as NCCL would for this value of `NCCL_DEBUG` ("WARN", "INFO",
/// "TRACE"; anything else prints nothing). Once per process; later calls do nothing.
pub fn print_to_stderr(nccl_debug: &str) {
    static PRINTING: OnceLock<Option<Subscription>> = OnceLock::new();
    let most = match nccl_debug.to_ascii_uppercase().as_str() {
        "WARN" => ffi::NCCL_LOG_WARN,
        "INFO" => ffi::NCCL_LOG_INFO,
        "TRACE" => ffi::NCCL_LOG_TRACE,
        _ => ffi::NCCL_LOG_NONE,
    };
    PRINTING.get_or_init(|| {
        (most > ffi::NCCL_LOG_NONE).then(|| {
            let process = std::process::id();
            subscribe(move |record| {
                if record.level <= most {
                    // In one write, so that lines of several processes do not mix.
                    let line = format!("[{process}] NET {record}\n");
                    let _ = std::io::stderr().write_all(line.as_bytes());
                }
            })
        })
    });
}

/// The function to give to a plugin's `init`.
pub fn logger() -> ffi::ncclDebugLogger_t {
    let fixed: FixedLogger = receive;
    // SAFETY: both are C function pointers. On the platforms that Towline builds for, the variadic call passes its
    // arguments where this fixed list takes them from (see the module's text).
    Some(unsafe { std::mem::transmute::<FixedLogger, VariadicLogger>(fixed) })
}

type VariadicLogger = unsafe extern "C" fn(u32, c_ulong, *const c_char, c_int, *const c_char, ...);
type FixedLogger = unsafe extern "C" fn(
    u32,
    c_ulong,
    *const c_char,
    c_int,
    *const c_char,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    f64,
    f64,
    f64,
    f64,
    f64,
    f64,
    f64,
    f64,
);

#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
compile_error!("the host's logger relies on how x86-64 and aarch64 Linux pass variable arguments");

/// # Safety
/// `file` and `format` are NULL or NUL-terminated, and the arguments are those that `format` names.
#[allow(clippy::too_many_arguments, reason = "they are the variable arguments")]
#[rustfmt::skip]
unsafe extern "C" fn receive(
    level: u32, flags: c_ulong, file: *const c_char, line: c_int, format: *const c_char,
    i0: usize, i1: usize, i2: usize, i3: usize, i4: usize, i5: usize,
    i6: usize, i7: usize, i8: usize, i9: usize, i10: usize, i11: usize,
    f0: f64, f1: f64, f2: f64, f3: f64, f4: f64, f5: f64, f6: f64, f7: f64,
) {
    if format.is_null() {
        return;
    }
    let integers = [i0, i1, i2, i3, i4, i5, i6, i7, i8, i9, i10, i11];
    let floats = [f0, f1, f2, f3, f4, f5, f6, f7];
    // SAFETY: the caller's promise.
    let format = unsafe { CStr::from_ptr(format) };
    // SAFETY: the caller's promise.
    let file = if file.is_null() { String::new() } else { unsafe { CStr::from_ptr(file) }.to_string_lossy().into() };
    // SAFETY: the caller's promise: the arguments fit the format.
    let text = unsafe { print(format.to_bytes(), &integers, &floats) };
    let record = Record { level, flags, file, line, text };
    let sinks: Vec<Sink> =
        SINKS.lock().unwrap_or_else(PoisonError::into_inner).iter().map(|(_, sink)| Arc::clone(sink)).collect();
    for sink in sinks {
        sink(&record);
    }
}

/// Walks through a printf format and fills it in, one conversion at a time, each by the C library.
///
/// # Safety
/// The arguments are those that the format names; the text of `%s` is NUL-terminated, or as long as its precision.
unsafe fn print(format: &[u8], integers: &[usize], floats: &[f64]) -> String {
    let mut text = Vec::new();
    let (mut integers, mut floats) = (integers.iter().copied(), floats.iter().copied());
    let mut rest = format;
    while let Some(at) = rest.iter().position(|&byte| byte == b'%') {
        text.extend_from_slice(&rest[..at]);
        rest = &rest[at..];
        let Some(length) = rest[1..].iter().position(|byte| !b" #+-0123456789.*hlLqjzt'".contains(byte)) else { break };
        let (directive, after) = rest.split_at(length + 2);
        rest = after;
        let kind = directive[directive.len() - 1];
        let shown = match kind {
            b'%' => Some(b"%".to_vec()),
            b'n' => {
                integers.next();
                Some(Vec::new())
            }
            // SAFETY: the caller's promise, passed on for this conversion.
            _ => unsafe { convert(directive, kind, &mut integers, &mut floats) },
        };
        text.extend_from_slice(shown.as_deref().unwrap_or(directive));
    }
    text.extend_from_slice(rest);
    String::from_utf8_lossy(&text).into_owned()
}

/// One conversion through `snprintf`, or `None` when it is not understood or its argument is out of reach.
///
/// # Safety
/// As for [`print()`].
unsafe fn convert(
    directive: &[u8],
    kind: u8,
    integers: &mut impl Iterator<Item = usize>,
    floats: &mut impl Iterator<Item = f64>,
) -> Option<Vec<u8>> {
    // Width and precision given as arguments are written into the directive, so that one argument is left.
    let mut plain = Vec::with_capacity(directive.len() + 8);
    for &byte in directive {
        if byte == b'*' {
            let number = integers.next()? as c_int;
            // A negative precision counts as none, and printf has no sign there.
            if plain.ends_with(b".") && number < 0 {
                plain.pop();
            } else {
                plain.extend_from_slice(number.to_string().as_bytes());
            }
        } else {
            plain.push(byte);
        }
    }
    let is_long_double = directive.contains(&b'L');
    let directive = CString::new(plain).ok()?;
    let print = |to: *mut c_char, room: usize, argument: Argument| match argument {
        // SAFETY: `to` has `room` bytes, and the directive takes one argument of this kind.
        Argument::Integer(value) => unsafe { libc::snprintf(to, room, directive.as_ptr(), value) },
        // SAFETY: as above.
        Argument::Float(value) => unsafe { libc::snprintf(to, room, directive.as_ptr(), value) },
    };
    let argument = match kind {
        b's' => match integers.next()? {
            0 => return Some(b"(null)".to_vec()),
            address => Argument::Integer(address),
        },
        b'd' | b'i' | b'u' | b'x' | b'X' | b'o' | b'c' | b'p' => Argument::Integer(integers.next()?),
        b'f' | b'F' | b'e' | b'E' | b'g' | b'G' | b'a' | b'A' if !is_long_double => Argument::Float(floats.next()?),
        _ => return None,
    };
    let needed = usize::try_from(print(std::ptr::null_mut(), 0, argument)).ok()?;
    let mut text = vec![0_u8; needed + 1];
    print(text.as_mut_ptr().cast(), text.len(), argument);
    text.truncate(needed);
    Some(text)
}

#[derive(Clone, Copy)]
enum Argument {
    Integer(usize),
    Float(f64),
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls the logger as a C plugin would and returns the line that contains `mark`.
    macro_rules! logged {
        ($format:literal $(, $argument:expr)*) => {{
            let capture = Capture::start();
            let log = logger().unwrap();
            // SAFETY: the strings are literals with their NUL and the arguments fit the format.
            unsafe { log(ffi::NCCL_LOG_INFO, 0x10, c"net.c".as_ptr(), 42, $format.as_ptr() $(, $argument)*) };
            let marked = |record: &&Record| record.file == "net.c";
            capture.records().iter().rfind(marked).unwrap().text.clone()
        }};
    }

    /// One test, since the sinks are the process's.
    #[test]
    fn printf_formats_are_filled_in_as_c_would() {
        assert_eq!(logged!(c"plain"), "plain");
        assert_eq!(logged!(c"NET/%s : %d of %d", c"eth0".as_ptr(), -3_i32, 7_i32), "NET/eth0 : -3 of 7");
        assert_eq!(
            logged!(
                c"%s|%d|%ld|%5.1f|%zu|%x|%c|%.2e",
                c"a".as_ptr(),
                1_i32,
                -2_i64,
                2.25_f64,
                3_usize,
                255_u32,
                65_i32,
                1e9_f64
            ),
            "a|1|-2|  2.2|3|ff|A|1.00e+09"
        );
        // Six arguments and more travel on the stack.
        assert_eq!(
            logged!(
                c"%d %d %d %d %d %d %d %d %d %s",
                1_i32,
                2_i32,
                3_i32,
                4_i32,
                5_i32,
                6_i32,
                7_i32,
                8_i32,
                9_i32,
                c"ten".as_ptr()
            ),
            "1 2 3 4 5 6 7 8 9 ten"
        );
        assert_eq!(logged!(c"%-6s|%*d|%.*s|", c"ab".as_ptr(), 4_i32, 7_i32, 2_i32, c"xyz".as_ptr()), "ab    |   7|xy|");
        assert_eq!(logged!(c"100%% %s", std::ptr::null::<c_char>()), "100% (null)");
        assert_eq!(logged!(c"open %"), "open %");
        assert_eq!(logged!(c"%llu %hhd", u64::MAX, 300_i32), "18446744073709551615 44");
    }
}

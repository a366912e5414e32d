//! This host.

/// Its name, as the kernel has it.
pub(crate) fn name() -> String {
    let mut name = [0_u8; 256];
    // SAFETY: the buffer has the passed length, less one for a terminating zero.
    unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len() - 1) };
    let length = name.iter().position(|&byte| byte == 0).unwrap_or(0);
    String::from_utf8_lossy(&name[..length]).into_owned()
}

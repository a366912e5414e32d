//! Cures as commands for a shell.

use crate::os::nccl_conf::Variables;

/// The text, quoted as one argument for a shell.
pub(super) fn quoted(text: impl AsRef<str>) -> String {
    let text = text.as_ref();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_./:,^=@%+-".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

/// Sets a variable: the environment wins over NCCL's files.
pub(super) fn export(name: &str, value: impl AsRef<str>) -> String {
    format!("export {name}={}", quoted(value))
}

/// Unsets a variable, in the shell or in the file that sets it.
pub(super) fn unset(variables: &Variables, name: &str) -> String {
    match variables.file_of(name) {
        Some(file) => format!("sed -i '/^{name}=/d' {}", quoted(file.to_string_lossy())),
        None => format!("unset {name}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_reads_a_quoted_word_as_it_was() {
        for text in ["", "eth0", "a b", "it's", "^docker,lo", "$HOME", "\"x\""] {
            let output = std::process::Command::new("sh").args(["-c", &format!("printf %s {}", quoted(text))]).output();
            assert_eq!(String::from_utf8(output.unwrap().stdout).unwrap(), text);
        }
    }
}

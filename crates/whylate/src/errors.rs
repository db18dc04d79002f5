// SPDX-License-Identifier: MIT OR Apache-2.0
//! Usage errors, and remedies for errors of the kernel.

use std::error::Error;
use std::fmt;
use std::io;

/// Usage error: arguments that are valid one by one, but not together, or the name of something that does not exist.
#[derive(Debug)]
pub struct UsageError(pub anyhow::Error);

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Error for UsageError {}

/// Makes the error of opening a file that the user names a usage error if there is no such file.
///
/// # Errors
/// Fails if `opened` has.
pub fn existing<T>(opened: io::Result<T>) -> anyhow::Result<T> {
    opened.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => UsageError(error.into()).into(),
        _ => error.into(),
    })
}

/// Returns a remedy to append to a message that only has the kernel's error.
pub fn what_to_do(message: &str) -> &'static str {
    match message.ends_with("(os error 24)") {
        true => ": raise the limit on open files, e.g. with ulimit -n 4096",
        false => "",
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn suggests_ulimit_when_out_of_descriptors() {
        let error =
            anyhow::Error::from(io::Error::from_raw_os_error(Errno::MFILE.raw_os_error())).context("cannot attach");
        assert!(what_to_do(&format!("{error:#}")).contains("ulimit -n"));
        assert_eq!(what_to_do("cannot attach: Permission denied (os error 13)"), "");
    }
}

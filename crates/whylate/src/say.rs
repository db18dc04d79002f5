// SPDX-License-Identifier: MIT OR Apache-2.0
//! Messages on standard error.

/// Prints a line to standard error, like `eprintln!`, but ignores write errors (a full disk, a closed pipe) instead of
/// panicking. Escapes characters that are not printable.
macro_rules! say {
    ($($words:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), "{}", whylate_model::units::printable(&format!($($words)*)));
    }};
}

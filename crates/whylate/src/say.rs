// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is said beside the output.

/// A line on standard error, as by `eprintln!`, which panics where it cannot be written: on a full disk, or to a reader
/// that has gone. What is measured is worth no less then. Names of files and threads in it are printable.
macro_rules! say {
    ($($words:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), "{}", whylate_model::units::printable(&format!($($words)*)));
    }};
}

// SPDX-License-Identifier: MIT OR Apache-2.0
//! Demangles the symbols of C++ and Rust functions.
//!
//! Any user's program chooses its symbols, so demangling has bounded time, memory and stack. `cpp_demangle` 0.5.1 has
//! not: it writes 206 MB for a symbol of 260 bytes, and its parser takes exponential time, days for `_Z1fDT` followed by
//! thirty times `nw`. The parser here reads each byte once, and the printer counts its steps.

mod parser;
mod printer;

use std::borrow::Cow;
use std::fmt::Write as _;

use whylate_model::name::{BoundedText, MAX_BYTES, bounded};

/// Returns the name to show for a symbol, of at most [`MAX_BYTES`]: demangled if it is a mangled C++ or Rust name.
///
/// Only `_Z` and `_R` start a mangled name. A C function may be called `h` or `w`, which are types in a mangled name.
pub(crate) fn demangled(symbol: &str) -> Cow<'_, str> {
    if symbol.len() > MAX_BYTES {
        return bounded(symbol);
    }
    // Legacy Rust symbols are C++ names that end in a component of a hash.
    if (symbol.starts_with("_R") || symbol.starts_with("_ZN") && symbol.contains("17h"))
        && let Ok(name) = rustc_demangle::try_demangle(symbol)
    {
        let mut text = BoundedText::default();
        // Writing fails when the text is full.
        let _ = write!(text, "{name:#}");
        return text.finish().into();
    }
    symbol.strip_prefix("_Z").and_then(cpp).map_or(Cow::Borrowed(symbol), Cow::Owned)
}

/// Demangles the text after `_Z`.
fn cpp(mangled: &str) -> Option<String> {
    let (nodes, whole, suffix) = parser::parse(mangled)?;
    printer::print(&nodes, whole, suffix)
}

#[cfg(test)]
mod tests;

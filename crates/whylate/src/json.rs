// SPDX-License-Identifier: MIT OR Apache-2.0
//! Lines of JSON.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::ser::{CompactFormatter, Formatter};
use whylate_model::units::is_printable;

/// Writes an object on a line. All JSON is written by this function, which escapes control characters for terminals.
pub fn write_line<W: Write + ?Sized>(out: &mut W, object: &impl Serialize) -> io::Result<()> {
    object.serialize(&mut serde_json::Serializer::with_formatter(&mut *out, Printable))?;
    writeln!(out)
}

/// Escapes characters that are not printable and that JSON allows in strings: some terminals begin escape sequences at
/// U+009B, and marks of direction reverse the rest of a line. Readers get the same text.
struct Printable;

impl Formatter for Printable {
    fn write_string_fragment<W: ?Sized + Write>(&mut self, writer: &mut W, fragment: &str) -> io::Result<()> {
        // serde has escaped ASCII control characters except DEL, and most fragments have no others.
        if fragment.bytes().all(|byte| byte < 0x7f) {
            return CompactFormatter.write_string_fragment(writer, fragment);
        }
        let mut rest = fragment;
        while let Some(at) = rest.find(|c: char| !is_printable(c)) {
            let (plain, from) = rest.split_at(at);
            CompactFormatter.write_string_fragment(writer, plain)?;
            let mut chars = from.chars();
            if let Some(escaped) = chars.next() {
                for unit in escaped.encode_utf16(&mut [0; 2]) {
                    write!(writer, "\\u{unit:04x}")?;
                }
            }
            rest = chars.as_str();
        }
        CompactFormatter.write_string_fragment(writer, rest)
    }
}

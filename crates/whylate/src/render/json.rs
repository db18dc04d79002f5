// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writes JSON lines.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::ser::{CompactFormatter, Formatter};
use whylate_model::units::is_printable;
use whylate_model::{LateEvent, Snapshot};

use crate::render::text::Output;
use crate::render::text::footer::are_explained;

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

/// Output that writes each snapshot as a line of JSON, and no late events.
#[derive(Debug)]
pub struct JsonLines;

impl Output for JsonLines {
    fn begin(&mut self, _out: &mut dyn Write) -> io::Result<()> {
        Ok(())
    }

    fn late(&mut self, _out: &mut dyn Write, _event: &LateEvent) -> io::Result<()> {
        Ok(())
    }

    fn snapshot(&mut self, out: &mut dyn Write, snapshot: Snapshot) -> io::Result<()> {
        are_explained(&snapshot);
        write_line(out, &snapshot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escaped_control_characters_round_trip() {
        let name: String =
            (0..=0xa1).chain(0x2000..0x2070).chain(0xe0000..0xe0080).filter_map(char::from_u32).collect();
        let mut snapshot = Snapshot::new("offcpu", "sample", "host", 0);
        snapshot.late.push(LateEvent { labels: [(name.clone(), name.clone())].into(), ..LateEvent::default() });
        let text = crate::render::text::text_of(|out| JsonLines.snapshot(out, snapshot));
        let line = text.strip_suffix('\n').expect("a line");
        assert!(line.chars().all(is_printable), "{line:?}");
        assert!(line.contains(r"\u202e") && line.contains(r"\udb40\udc01"), "{line:?}");
        assert!(line.contains(r"~\u007f\u0080") && line.contains("\\u009f\u{a0}\u{a1}"), "{line:?}");
        let printed: Snapshot = serde_json::from_str(line).expect("a snapshot");
        assert_eq!(printed.late[0].labels[&name], name);
    }
}

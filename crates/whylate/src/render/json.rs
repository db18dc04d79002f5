// SPDX-License-Identifier: MIT OR Apache-2.0
//! Output as JSON lines.

use std::io::{self, Write};

use whylate_model::{LateEvent, Snapshot};

use crate::json::write_line;
use crate::render::text::Output;
use crate::render::text::footer::are_explained;

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
    use whylate_model::units::is_printable;

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

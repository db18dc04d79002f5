// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders an interactive flame graph (SVG).

mod graph;

use std::collections::BTreeMap;
use std::io::{self, Write};

use inferno::flamegraph::color::{Color, PaletteMap};
use whylate_model::Snapshot;
use whylate_model::folded::{Frame, Kind, Root, frames, line, lines_with, waiting};

pub use self::graph::write_lines;

use self::graph::{draw, options};
use super::summary;

/// Writes the flame graph of a snapshot: kernel frames are darker than those of programs.
///
/// # Errors
/// Fails if the writer does, or if nothing waits.
pub fn write(out: &mut dyn Write, snapshot: &Snapshot, root: Root, hide_idle: bool) -> io::Result<()> {
    let mut colors = colors_of(waiting(snapshot, hide_idle).flat_map(|stack| frames(stack, root)));
    let mut options = options("Off-CPU time");
    options.subtitle = Some(summary(snapshot, hide_idle));
    options.palette_map = Some(&mut colors);
    draw(out, options, &lines_with(waiting(snapshot, hide_idle), root, marked))
}

/// Writes the flame graph of frames with their nanoseconds, in the colors of [`write()`].
///
/// # Errors
/// Fails if the writer does, or if there are none.
pub fn write_frames(out: &mut dyn Write, title: &str, subtitle: &str, stacks: &[(Vec<Frame>, u64)]) -> io::Result<()> {
    let mut colors = colors_of(stacks.iter().flat_map(|(frames, _)| frames.iter().cloned()));
    let mut options = options(title);
    options.subtitle = Some(subtitle.to_owned());
    options.palette_map = Some(&mut colors);
    let joined = |frames: &[Frame]| frames.iter().cloned().map(marked).collect::<Vec<_>>().join(";");
    let lines: Vec<String> = stacks.iter().map(|(frames, ns)| line(&joined(frames), *ns)).collect();
    draw(out, options, &lines)
}

fn colors_of(frames: impl Iterator<Item = Frame>) -> PaletteMap {
    let mut kinds = BTreeMap::new();
    for frame in frames {
        let kind = frame.kind;
        kinds.insert(marked(frame), kind);
    }
    let mut colors = PaletteMap::default();
    for (name, kind) in kinds {
        colors.insert(&name, color(&name, kind));
    }
    colors
}

/// Marks frames of wakers by the suffix that flame graphs color differently and do not show.
fn marked(frame: Frame) -> String {
    match frame.kind {
        Kind::Waker => frame.name + "_[w]",
        _ => frame.name,
    }
}

/// Returns the color of a frame: labels grey, programs light blue, the kernel dark blue, wakers aqua, what they did
/// sand. The shade depends only on the function's name.
fn color(name: &str, kind: Kind) -> Color {
    // FNV-1a (RFC draft eastlake-fnv).
    let hash = name.bytes().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    let shade = (hash >> 24) as u8 / 5;
    let [r, g, b] = match kind {
        Kind::Label => [190, 196 + shade / 4, 205],
        Kind::Between => [160, 160, 160],
        Kind::Runnable => [230, 150, 110],
        Kind::User => [105 + shade, 170 + shade, 235],
        Kind::Kernel => [60 + shade, 110 + shade, 205],
        Kind::Waker => [70 + shade, 200 + shade, 200 + shade],
        Kind::WhileWaiting => [225, 205 + shade / 4, 130],
    };
    Color { r, g, b }
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;
    use crate::render::text::text_of;

    /// Returns all text of an SVG, by an XML parser that rejects malformed input.
    fn texts(svg: &str) -> Vec<String> {
        use quick_xml::events::Event;
        let mut reader = quick_xml::Reader::from_str(svg);
        reader.config_mut().check_end_names = true;
        let (mut texts, mut text) = (Vec::new(), String::new());
        loop {
            match reader.read_event().expect("XML") {
                Event::Eof => return texts,
                Event::Start(tag) | Event::Empty(tag) => {
                    tag.attributes().for_each(|attribute| drop(attribute.expect("an attribute")));
                    text.clear();
                }
                Event::Text(part) => text += &part.decode().expect("UTF-8"),
                Event::GeneralRef(name) => match &*name.decode().expect("UTF-8") {
                    "lt" => text.push('<'),
                    "gt" => text.push('>'),
                    "amp" => text.push('&'),
                    "quot" => text.push('"'),
                    "apos" => text.push('\''),
                    other => assert!(other.starts_with('#'), "&{other}; is not of XML"),
                },
                Event::End(_) => texts.push(std::mem::take(&mut text)),
                _ => {}
            }
        }
    }

    #[test]
    fn names_are_text_and_no_markup() {
        let svg = text_of(|out| write(out, &sample::snapshot(), Root::Thread, false));
        assert!(!svg.contains("<script>alert"), "a name is markup");
        assert!(svg.contains("&lt;script&gt;alert"), "the name is gone");
        assert!(!svg.contains('\x1b'));
        assert!(texts(&svg).iter().any(|text| text.contains("<script>alert")), "no text has the name");
        assert!(svg.contains("2.00s at 9 Hz, 7 threads, 12.0s off CPU, 1.00s on CPU, 1 lost"), "no subtitle");
        let kernel = color("do_poll", Kind::Kernel);
        assert!(
            svg.contains(&format!("rgb({},{},{})", kernel.r, kernel.g, kernel.b)),
            "the kernel has no color of its own"
        );
    }

    #[test]
    fn wakers_have_a_color_of_their_own_in_the_same_functions() {
        let svg = text_of(|out| write(out, &sample::with_wakers(), Root::Process, false));
        let texts = texts(&svg);
        for name in ["wake_up_q", "writer:", "[interrupt]", "[not woken yet]", "--"] {
            assert!(texts.iter().any(|text| text.starts_with(&format!("{name} ("))), "{name} is not there");
        }
        assert!(!svg.contains("_[w]"), "the mark is shown");
        for color in [color("do_futex", Kind::Kernel), color("do_futex_[w]", Kind::Waker)] {
            assert!(svg.contains(&format!("rgb({},{},{})", color.r, color.g, color.b)), "{color:?} is not there");
        }
    }

    #[test]
    fn refuses_to_draw_nothing() {
        let empty = Snapshot::new("offcpu", "sample", "host", 0);
        assert!(write(&mut Vec::new(), &empty, Root::Process, false).is_err());
    }
}

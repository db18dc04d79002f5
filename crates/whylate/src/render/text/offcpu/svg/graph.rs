// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders flame graphs of folded lines.

use std::io::{self, Write};

use inferno::flamegraph::color::{BackgroundColor, BasicPalette, Palette};
use inferno::flamegraph::{self, Direction, Options};

/// Writes the flame graph of folded lines: those with two counts are drawn as a difference.
///
/// # Errors
/// Fails if the writer does, or if there are no lines.
pub fn write_lines(out: &mut dyn Write, title: &str, count: &str, folded: &[String]) -> io::Result<()> {
    let mut options = options(title);
    options.count_name = count.to_owned();
    draw(out, options, folded)
}

/// Returns the options that all graphs share.
pub fn options(title: &str) -> Options<'static> {
    let mut options = Options::default();
    options.title = title.to_owned();
    options.count_name = "us".to_owned();
    options.colors = Palette::Basic(BasicPalette::Io);
    options.bgcolors = Some(BackgroundColor::Blue);
    options.deterministic = true;
    // The root is on top: a browser shows the top of a graph first, which one deep stack would otherwise leave empty.
    options.direction = Direction::Inverted;
    options
}

/// Draws folded lines.
///
/// # Errors
/// Fails if the writer does, or if there are no lines.
pub fn draw(out: &mut dyn Write, mut options: Options<'_>, folded: &[String]) -> io::Result<()> {
    if folded.is_empty() {
        return Err(io::Error::other("there is nothing to draw: no thread was seen waiting"));
    }
    flamegraph::from_lines(&mut options, folded.iter().map(String::as_str), out)
}

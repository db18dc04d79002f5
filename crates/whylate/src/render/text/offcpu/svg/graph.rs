// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders flame graphs of folded lines.

use std::io::{self, Write};

use inferno::flamegraph::color::{BackgroundColor, BasicPalette, Palette};
use inferno::flamegraph::{self, Direction, Options, TextTruncateDirection};
use whylate_model::units::format_ns;

/// Unit of times in folded lines.
pub const NS: &str = "ns";

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
    options.count_name = NS.to_owned();
    // The beginning of a name says more than its end.
    options.text_truncate_direction = TextTruncateDirection::Right;
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
    let mut svg = Vec::new();
    flamegraph::from_lines(&mut options, folded.iter().map(String::as_str), &mut svg)?;
    match options.count_name == NS {
        true => out.write_all(with_units(&String::from_utf8_lossy(&svg)).as_bytes()),
        false => out.write_all(&svg),
    }
}

/// Shows durations as elsewhere: `(300ms, 12.50%)` instead of `(300,053,982 ns, 12.50%)`.
fn with_units(svg: &str) -> String {
    const UNIT: &str = " ns, ";
    let mut out = String::with_capacity(svg.len());
    let mut rest = svg;
    while let Some(at) = rest.find(UNIT) {
        let (before, after) = (&rest[..at], &rest[at + UNIT.len()..]);
        let digits = before.trim_end_matches(|c: char| c.is_ascii_digit() || c == ',');
        match before[digits.len()..].replace(',', "").parse() {
            Ok(ns) if digits.ends_with('(') => out += &format!("{digits}{}, ", format_ns(ns)),
            _ => out += &format!("{before}{UNIT}"),
        }
        rest = after;
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_units() {
        assert_eq!(with_units("<title>f (300,053,982 ns, 12.50%)</title>"), "<title>f (300ms, 12.50%)</title>");
        assert_eq!(with_units("all (7 ns, 100%) g (x ns, y)"), "all (7ns, 100%) g (x ns, y)");
    }

    #[test]
    fn long_names_keep_their_beginning() {
        let name = "a_function_with_a_long_name_that_does_not_fit_into_its_box";
        let lines = [format!("p;{name} 10000000"), "p;other 90000000".to_owned()];
        let mut svg = Vec::new();
        write_lines(&mut svg, "Off-CPU", NS, &lines).expect("memory takes everything");
        let svg = String::from_utf8_lossy(&svg);
        assert!(svg.contains(">a_function") && svg.contains(&format!("{name} (10.0ms, 10.00%)")), "{svg}");
    }
}

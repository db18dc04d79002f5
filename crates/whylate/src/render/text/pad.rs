// SPDX-License-Identifier: MIT OR Apache-2.0
//! Aligns text of any length: the standard library's formatting panics at widths above 65,535.

use std::fmt::{self, Display, Formatter};

/// Displays this number of spaces.
pub struct Spaces(pub usize);

impl Display for Spaces {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        const SOME: &str = "                                ";
        (0..self.0 / SOME.len()).try_for_each(|_| out.write_str(SOME))?;
        out.write_str(&SOME[..self.0 % SOME.len()])
    }
}

/// The text padded with trailing spaces to a width in characters.
pub struct Left<'a>(pub &'a str, pub usize);

/// The text padded with leading spaces to a width in characters.
pub struct Right<'a>(pub &'a str, pub usize);

fn missing(text: &str, width: usize) -> Spaces {
    Spaces(width.saturating_sub(text.chars().count()))
}

impl Display for Left<'_> {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        write!(out, "{}{}", self.0, missing(self.0, self.1))
    }
}

impl Display for Right<'_> {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        write!(out, "{}{}", missing(self.0, self.1), self.0)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    use super::*;

    #[test]
    fn text_is_aligned_by_characters_to_any_width() {
        assert_eq!(format!("{}|{}|", Left("\u{e9}", 3), Right("\u{e9}", 3)), "\u{e9}  |  \u{e9}|");
        assert_eq!(format!("{}{}", Left("abc", 2), Right("abc", 0)), "abcabc");
        for width in [0, 1, 31, 32, 33, 70_000] {
            assert_eq!(Spaces(width).to_string(), " ".repeat(width));
            assert_eq!(Left("a", width).to_string().len(), width.max(1));
        }
    }

    fn rust_files(directory: &Path) -> Vec<PathBuf> {
        let entries = fs::read_dir(directory).expect("a directory").map(|entry| entry.expect("an entry").path());
        let each = entries.flat_map(|path| if path.is_dir() { rust_files(&path) } else { vec![path] });
        each.filter(|path| path.extension().is_some_and(|end| end == "rs")).collect()
    }

    /// Returns whether a line has a format with a width argument, such as `{name:>width$}` or `{:1$}`, not a precision.
    fn has_width_of_data(line: &str) -> bool {
        line.split('{').skip(1).filter_map(|rest| rest.split('}').next()).any(|format| {
            let width = format.split_once(':').map_or("", |(_, format)| format.split('.').next().unwrap_or(""));
            width.ends_with('$') && width.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ')
        })
    }

    #[test]
    fn no_format_has_width_argument() {
        for format in ["{name:>width$}", "{:indent$}{}", "{:1$}", "|{bar:<rest$}|", "{:*^at$}", "{a:width$.digits$}"] {
            assert!(has_width_of_data(format), "{format}");
        }
        for format in ["{value:.digits$}", "{:>10}", "{name}$", "{{:a$}}x"] {
            assert!(!has_width_of_data(format) || format.starts_with("{{"), "{format}");
        }
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        for krate in [source.clone(), source.join("../../whylate-model/src"), source.join("../../whylate-sources/src")]
        {
            for file in rust_files(&krate).into_iter().filter(|file| !file.ends_with("text/pad.rs")) {
                let text = fs::read_to_string(&file).expect("it is text");
                let found = text.lines().find(|line| has_width_of_data(line));
                assert_eq!(found, None, "{}: use crate::render::text::pad", file.display());
            }
        }
    }
}

// SPDX-License-Identifier: MIT OR Apache-2.0
//! The serial line carries the command's output and, after a unique mark, its status.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::io::{self, Write};

/// Returns a mark that no command can know.
pub fn new_mark() -> String {
    let random = || RandomState::new().build_hasher().finish();
    format!("whylate-vm-{:016x}{:016x} ", random(), random())
}

/// Passes on the output before the mark.
pub struct Output<W> {
    to: W,
    mark: Vec<u8>,
    held_back: Vec<u8>,
}

impl<W: Write> Output<W> {
    pub fn new(to: W, mark: &str) -> Self {
        Self { to, mark: mark.as_bytes().to_owned(), held_back: Vec::new() }
    }

    /// Passes on what precedes the mark, and returns the status once it is complete.
    pub fn take(&mut self, bytes: &[u8]) -> io::Result<Option<u8>> {
        self.held_back.extend_from_slice(bytes);
        let (ready, status) = match find(&self.held_back, &self.mark) {
            Some(index) => {
                let rest = &self.held_back[index + self.mark.len()..];
                let line = rest.iter().position(|&byte| byte == b'\n').map(|end| &rest[..end]);
                let status = line.and_then(|line| std::str::from_utf8(line).ok()?.trim().parse().ok());
                (index, status)
            }
            None => (self.held_back.len() - partial_mark_length(&self.held_back, &self.mark), None),
        };
        self.to.write_all(&self.held_back[..ready])?;
        self.to.flush()?;
        self.held_back.drain(..ready);
        Ok(status)
    }
}

fn find(bytes: &[u8], mark: &[u8]) -> Option<usize> {
    bytes.windows(mark.len()).position(|window| window == mark)
}

/// Returns how many of the last bytes may be the beginning of the mark.
fn partial_mark_length(bytes: &[u8], mark: &[u8]) -> usize {
    (1..mark.len().min(bytes.len() + 1)).rev().find(|&length| bytes.ends_with(&mark[..length])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use anyhow::Result;

    use super::*;

    /// Returns the output and the status, from bytes in pieces of this size.
    fn in_pieces(text: &str, mark: &str, size: usize) -> Result<(String, Option<u8>)> {
        let mut to = Vec::new();
        let mut output = Output::new(&mut to, mark);
        let mut status = None;
        for piece in text.as_bytes().chunks(size) {
            status = output.take(piece)?;
            if status.is_some() {
                break;
            }
        }
        Ok((String::from_utf8(to)?, status))
    }

    #[test]
    fn status_is_found_at_any_piece_size() -> Result<()> {
        let mark = new_mark();
        let text = format!("one\ntwo{mark}17\nnever shown");
        for size in 1..text.len() {
            assert_eq!(in_pieces(&text, &mark, size)?, ("one\ntwo".to_owned(), Some(17)), "pieces of {size}");
        }
        Ok(())
    }

    #[test]
    fn prefix_of_mark_is_passed_on() -> Result<()> {
        let text = "aab aab aaab. aaab 0\n";
        for size in 1..text.len() {
            assert_eq!(in_pieces(text, "aaab ", size)?, ("aab aab aaab. ".to_owned(), Some(0)), "pieces of {size}");
        }
        Ok(())
    }

    #[test]
    fn holds_back_only_possible_marks() -> Result<()> {
        let mark = new_mark();
        assert_eq!(in_pieces("without an end", &mark, 5)?, ("without an end".to_owned(), None));
        Ok(())
    }

    #[test]
    fn marks_differ() {
        assert_ne!(new_mark(), new_mark());
    }
}

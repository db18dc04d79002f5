// SPDX-License-Identifier: MIT OR Apache-2.0
//! The one serial line carries what the command prints and, after a mark that nothing else prints, its status.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::io::{self, Write};

/// A mark that no command can know.
pub fn new_mark() -> String {
    let random = || RandomState::new().build_hasher().finish();
    format!("whylate-vm-{:016x}{:016x} ", random(), random())
}

/// Passes on what comes before the mark.
pub struct Output<W> {
    to: W,
    mark: Vec<u8>,
    held_back: Vec<u8>,
}

impl<W: Write> Output<W> {
    pub fn new(to: W, mark: &str) -> Self {
        Self { to, mark: mark.as_bytes().to_owned(), held_back: Vec::new() }
    }

    /// The status, once it has come.
    pub fn take(&mut self, bytes: &[u8]) -> io::Result<Option<u8>> {
        self.held_back.extend_from_slice(bytes);
        let (ready, status) = match find(&self.held_back, &self.mark) {
            Some(place) => {
                let rest = &self.held_back[place + self.mark.len()..];
                let line = rest.iter().position(|&byte| byte == b'\n').map(|end| &rest[..end]);
                let status = line.and_then(|line| std::str::from_utf8(line).ok()?.trim().parse().ok());
                (place, status)
            }
            None => (self.held_back.len() - begun(&self.held_back, &self.mark), None),
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

/// How many of the last bytes may be the beginning of the mark.
fn begun(bytes: &[u8], mark: &[u8]) -> usize {
    (1..mark.len().min(bytes.len() + 1)).rev().find(|&length| bytes.ends_with(&mark[..length])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use anyhow::Result;

    use super::*;

    /// What is passed on, and the status, when the bytes come in pieces of this size.
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
    fn the_status_is_found_however_the_bytes_come() -> Result<()> {
        let mark = new_mark();
        let text = format!("one\ntwo{mark}17\nnever shown");
        for size in 1..text.len() {
            assert_eq!(in_pieces(&text, &mark, size)?, ("one\ntwo".to_owned(), Some(17)), "pieces of {size}");
        }
        Ok(())
    }

    #[test]
    fn what_only_begins_like_the_mark_is_passed_on() -> Result<()> {
        let text = "aab aab aaab. aaab 0\n";
        for size in 1..text.len() {
            assert_eq!(in_pieces(text, "aaab ", size)?, ("aab aab aaab. ".to_owned(), Some(0)), "pieces of {size}");
        }
        Ok(())
    }

    #[test]
    fn nothing_is_held_back_that_cannot_be_the_mark() -> Result<()> {
        let mark = new_mark();
        assert_eq!(in_pieces("without an end", &mark, 5)?, ("without an end".to_owned(), None));
        Ok(())
    }

    #[test]
    fn marks_differ() {
        assert_ne!(new_mark(), new_mark());
    }
}

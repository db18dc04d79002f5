// SPDX-License-Identifier: MIT OR Apache-2.0
//! Parses keys from a terminal's input bytes.

/// A key press.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    Char(char),
    Enter,
    Esc,
    Tab,
    BackTab,
    Backspace,
    Up,
    Down,
    Left,
    Right,
    PageUp,
    PageDown,
    Home,
    End,
    /// Ctrl-C.
    Interrupt,
    /// Ctrl-Z.
    Suspend,
    /// Ctrl-L.
    Redraw,
}

/// Maximum length of an escape sequence in bytes.
const MAX_SEQUENCE: usize = 32;
const ESC: u8 = 0x1b;

/// Incremental parser: a key may arrive in several reads.
#[derive(Debug, Default)]
pub struct Keys {
    pending: Vec<u8>,
}

/// Result of parsing the start of the input.
enum Parsed {
    /// A complete sequence: the key, `None` if unknown, and its length in bytes.
    Key(Option<Key>, usize),
    /// An incomplete sequence.
    Incomplete,
}

impl Keys {
    /// Parses input and returns the complete keys.
    pub fn take(&mut self, bytes: &[u8]) -> Vec<Key> {
        self.pending.extend_from_slice(bytes);
        let mut keys = Vec::new();
        let mut at = 0;
        while at < self.pending.len() {
            match first(&self.pending[at..]) {
                Parsed::Key(key, length) => {
                    keys.extend(key);
                    at += length;
                }
                Parsed::Incomplete if self.pending.len() - at > MAX_SEQUENCE => at = self.pending.len(),
                Parsed::Incomplete => break,
            }
        }
        self.pending.drain(..at);
        keys
    }

    /// Returns whether an incomplete sequence is pending; it may also be a whole key (Esc).
    pub fn has_part(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Ends a pending sequence after a timeout: a lone `ESC` is the Esc key.
    pub fn end(&mut self) -> Option<Key> {
        let is_escape = self.pending.first() == Some(&ESC);
        self.pending.clear();
        is_escape.then_some(Key::Esc)
    }
}

fn first(bytes: &[u8]) -> Parsed {
    let one = |key| Parsed::Key(Some(key), 1);
    match bytes[0] {
        ESC => escape(bytes),
        b'\r' | b'\n' => one(Key::Enter),
        b'\t' => one(Key::Tab),
        0x7f | 0x08 => one(Key::Backspace),
        0x03 => one(Key::Interrupt),
        0x1a => one(Key::Suspend),
        0x0c => one(Key::Redraw),
        // Ctrl-B and Ctrl-U, Ctrl-F and Ctrl-D, as in less(1).
        0x02 | 0x15 => one(Key::PageUp),
        0x06 | 0x04 => one(Key::PageDown),
        0..0x20 => Parsed::Key(None, 1),
        _ => character(bytes),
    }
}

fn character(bytes: &[u8]) -> Parsed {
    let length = match bytes[0] {
        0..0x80 => 1,
        0xc0..0xe0 => 2,
        0xe0..0xf0 => 3,
        0xf0..0xf8 => 4,
        _ => return Parsed::Key(None, 1),
    };
    let Some(whole) = bytes.get(..length) else { return Parsed::Incomplete };
    match std::str::from_utf8(whole).ok().and_then(|text| text.chars().next()) {
        Some(character) => Parsed::Key(Some(Key::Char(character)).filter(|_| !character.is_control()), length),
        None => Parsed::Key(None, 1),
    }
}

/// ECMA-48: `ESC [`, parameters, and a final byte; or `ESC O` and one, of keypads.
fn escape(bytes: &[u8]) -> Parsed {
    match bytes.get(1) {
        None => Parsed::Incomplete,
        Some(b'O') => match bytes.get(2) {
            None => Parsed::Incomplete,
            Some(&byte) => Parsed::Key(of_letter(byte), 3),
        },
        Some(b'[') => {
            let Some(length) = bytes[2..].iter().position(|byte| (0x40..0x7f).contains(byte)) else {
                return match bytes[2..].iter().all(|byte| (0x20..0x40).contains(byte)) {
                    true => Parsed::Incomplete,
                    false => Parsed::Key(None, 2),
                };
            };
            let (parameters, last) = (&bytes[2..2 + length], bytes[2 + length]);
            if !parameters.iter().all(|byte| (0x20..0x40).contains(byte)) {
                return Parsed::Key(None, 2);
            }
            let number = parameters.split(|&byte| byte == b';').next().unwrap_or_default();
            let key = match (last, number) {
                (b'~', b"1" | b"7") => Some(Key::Home),
                (b'~', b"4" | b"8") => Some(Key::End),
                (b'~', b"5") => Some(Key::PageUp),
                (b'~', b"6") => Some(Key::PageDown),
                (b'Z', _) => Some(Key::BackTab),
                (letter, _) => of_letter(letter),
            };
            Parsed::Key(key, length + 3)
        }
        // `ESC` and a character: Esc and a key, or Alt and a letter.
        Some(_) => Parsed::Key(Some(Key::Esc), 1),
    }
}

fn of_letter(letter: u8) -> Option<Key> {
    Some(match letter {
        b'A' => Key::Up,
        b'B' => Key::Down,
        b'C' => Key::Right,
        b'D' => Key::Left,
        b'H' => Key::Home,
        b'F' => Key::End,
        b'M' => Key::Enter,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn parses_key_sequences() {
        let of = |bytes: &[u8]| Keys::default().take(bytes);
        assert_eq!(of(b"j\x1b[A\x1bOB\x1b[5~\x1b[1;5C\r"), {
            [Key::Char('j'), Key::Up, Key::Down, Key::PageUp, Key::Right, Key::Enter]
        });
        assert_eq!(of("é\x1b[Z\x7f\x03".as_bytes()), [Key::Char('é'), Key::BackTab, Key::Backspace, Key::Interrupt]);
        assert_eq!(of(b"\x1b[200~x\x01\xff"), [Key::Char('x')]);
    }

    #[test]
    fn parses_split_sequences_and_lone_escape() {
        let mut keys = Keys::default();
        assert_eq!((keys.take(b"\x1b"), keys.has_part()), (vec![], true));
        assert_eq!((keys.take(b"["), keys.take(b"B"), keys.has_part()), (vec![], vec![Key::Down], false));
        assert_eq!((keys.take(b"\x1b"), keys.end(), keys.has_part()), (vec![], Some(Key::Esc), false));
        assert_eq!(keys.take(b"\x1b\x1b[A"), [Key::Esc, Key::Up]);
    }

    proptest! {
        #[test]
        fn parsing_is_independent_of_read_boundaries(
            bytes in prop::collection::vec(prop_oneof![any::<u8>(), Just(ESC), Just(b'['), Just(b'A')], 0..60),
            at in any::<prop::sample::Index>(),
        ) {
            let at = at.index(bytes.len() + 1);
            let mut whole = Keys::default();
            let all = whole.take(&bytes);
            let mut parts = Keys::default();
            let mut keys = parts.take(&bytes[..at]);
            keys.extend(parts.take(&bytes[at..]));
            prop_assert!(parts.pending.len() <= MAX_SEQUENCE && whole.pending.len() <= MAX_SEQUENCE);
            prop_assert_eq!(all, keys);
        }
    }
}

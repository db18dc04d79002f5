// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads untrusted text, which may be binary or endless.

use std::io::{self, Read};

/// Maximum length of a stack's line, in bytes.
pub const LONGEST_LINE: usize = 1 << 20;
/// Maximum size of a text that is kept in memory, in bytes.
pub(crate) const LONGEST: u64 = 256 << 20;
/// Bytes at the start of a file that are checked for binary data: as many as git checks.
const BINARY_CHECK_BYTES: usize = 8_000;

/// Error message for a binary file.
pub(crate) const BINARY: &str =
    "this is not text, as it has zero bytes near its start: give a text file (tr -d '\\0' removes them from a log)";

/// Returns whether the start of a file is binary.
pub(crate) fn is_binary(start: &[u8]) -> bool {
    start[..start.len().min(BINARY_CHECK_BYTES)].contains(&0)
}

/// Reads a text file to its end.
///
/// # Errors
/// Fails if the file cannot be read, is binary, or is too long.
pub fn read(mut input: impl Read) -> io::Result<String> {
    let mut bytes = Vec::new();
    input.by_ref().take(BINARY_CHECK_BYTES as u64).read_to_end(&mut bytes)?;
    if utf16(&bytes).is_none() && is_binary(&bytes) {
        return Err(invalid(BINARY));
    }
    input.take(LONGEST + 1 - bytes.len() as u64).read_to_end(&mut bytes)?;
    decoded(bytes)
}

/// Decodes a whole file in UTF-8 or UTF-16.
pub(crate) fn decoded(bytes: Vec<u8>) -> io::Result<String> {
    if bytes.len() as u64 > LONGEST {
        return Err(invalid("this is longer than 256 MiB: give a part of it"));
    }
    if let Some(is_big_endian) = utf16(&bytes) {
        return Ok(from_utf16(&bytes, is_big_endian));
    }
    Ok(String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
}

/// Returns whether a file is UTF-16, and whether it is big-endian: by its byte order mark, or because every other byte
/// of its start is zero.
pub(crate) fn utf16(head: &[u8]) -> Option<bool> {
    match head {
        [0xff, 0xfe, ..] => return head.iter().skip(3).step_by(2).take(64).any(|&byte| byte == 0).then_some(false),
        [0xfe, 0xff, ..] => return head.iter().skip(2).step_by(2).take(64).any(|&byte| byte == 0).then_some(true),
        _ => {}
    }
    let start = &head[..head.len().min(512) & !1];
    let zeros = |at: usize| start.iter().skip(at).step_by(2).filter(|&&byte| byte == 0).count();
    let (even, odd, half) = (zeros(0), zeros(1), start.len() / 2);
    match (even, odd) {
        _ if half < 8 => None,
        (0, odd) if odd * 10 >= half * 9 => Some(false),
        (even, 0) if even * 10 >= half * 9 => Some(true),
        _ => None,
    }
}

fn from_utf16(bytes: &[u8], is_big_endian: bool) -> String {
    let unit = |two: &[u8; 2]| if is_big_endian { u16::from_be_bytes(*two) } else { u16::from_le_bytes(*two) };
    let units = bytes.as_chunks::<2>().0.iter().map(unit);
    char::decode_utf16(units).map(|c| c.unwrap_or(char::REPLACEMENT_CHARACTER)).collect()
}

/// Returns a function's name without offset, address and module: of `console_unlock+0xc0/0x510 [module] <ffff…>`, and
/// of `tick_nohz_handler/0x0`, as old versions of trace-cmd print it.
pub fn function(symbol: &str) -> &str {
    let name = symbol.split_ascii_whitespace().next().unwrap_or_default();
    let end = ["+0x", "/0x"].iter().filter_map(|offset| name.find(offset)).min();
    end.map_or(name, |end| &name[..end])
}

fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strips_offset_of_function() {
        for (symbol, name) in [
            ("qseecom_probe+0x1/0x2 [qseecom]", "qseecom_probe"),
            ("tick_nohz_handler/0x0", "tick_nohz_handler"),
            ("mi_switch+0xbc", "mi_switch"),
            ("operator <ffff8000>", "operator"),
            ("0xffffffff81000000", "0xffffffff81000000"),
            ("", ""),
        ] {
            assert_eq!(function(symbol), name);
        }
    }

    #[test]
    fn rejects_binary_and_unterminated_input() {
        assert_eq!(read(&b"a 1\n\xff 2\n"[..]).expect("text"), "a 1\n\u{fffd} 2\n");
        let utf16: Vec<u8> = "a;b 1\na;c 2\n".encode_utf16().flat_map(u16::to_le_bytes).collect();
        assert_eq!(read(&utf16[..]).expect("text"), "a;b 1\na;c 2\n");
        let refused = |input: &mut dyn Read| read(input).expect_err("refused").to_string();
        assert_eq!(refused(&mut io::repeat(0)), BINARY);
        assert!(refused(&mut io::repeat(b'a')).contains("longer than 256 MiB"));
    }
}

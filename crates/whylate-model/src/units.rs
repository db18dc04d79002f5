// SPDX-License-Identifier: MIT OR Apache-2.0
//! Parsing and formatting of units.

use thiserror::Error;

/// Why a duration could not be parsed.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum DurationError {
    /// The text is not a number with a unit.
    #[error("write a number and a unit, such as 500us, 10ms, 2.5s, 5m or 1h")]
    Malformed,
    /// The number has no unit.
    #[error("add a unit ({0}ms, {0}s)")]
    NoUnit(String),
    /// The duration is 2^64 nanoseconds or more.
    #[error("that is more than 584 years")]
    TooLong,
}

/// Parses `10s`, `5m`, `1.33ms`, `200us`, `800ns`, `1h` or `2d`. A bare number is in `bare_unit_ns`, or refused if that is
/// `None`.
///
/// # Errors
/// Fails if the text is no such duration; negative ones are malformed.
pub fn parse_duration_ns(text: &str, bare_unit_ns: Option<u64>) -> Result<u64, DurationError> {
    let text = text.trim();
    let unit_at = text.find(|c: char| c.is_ascii_alphabetic() || c == 'µ').unwrap_or(text.len());
    let (number, unit) = text.split_at(unit_at);
    let unit_ns = match unit {
        "" => bare_unit_ns.unwrap_or(1),
        "ns" => 1,
        "us" | "µs" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        "m" => 60_000_000_000,
        "h" => 3_600_000_000_000,
        "d" => 86_400_000_000_000,
        _ => return Err(DurationError::Malformed),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = |part: &str| part.bytes().all(|b| b.is_ascii_digit());
    if (whole.is_empty() && fraction.is_empty()) || !digits(whole) || !digits(fraction) || fraction.len() > 18 {
        return Err(DurationError::Malformed);
    }
    // Zero is the same in every unit.
    if unit.is_empty() && bare_unit_ns.is_none() && number.contains(|c| matches!(c, '1'..='9')) {
        return Err(DurationError::NoUnit(number.to_owned()));
    }
    let whole_ns = if whole.is_empty() {
        0
    } else {
        // Only too many digits can fail here.
        whole.parse::<u64>().ok().and_then(|n| n.checked_mul(unit_ns)).ok_or(DurationError::TooLong)?
    };
    let fraction_ns = if fraction.is_empty() {
        0
    } else {
        let numerator: u128 = fraction.parse().map_err(|_| DurationError::Malformed)?;
        u64::try_from(numerator * u128::from(unit_ns) / 10u128.pow(fraction.len() as u32))
            .map_err(|_| DurationError::TooLong)?
    };
    whole_ns.checked_add(fraction_ns).ok_or(DurationError::TooLong)
}

/// Formats a duration with three significant digits and its unit, e.g. `12.3ms`.
pub fn format_ns(ns: u64) -> String {
    const UNITS: [(u64, &str); 4] = [(1, "ns"), (1_000, "us"), (1_000_000, "ms"), (1_000_000_000, "s")];
    // A value that would round up to 1000 of a unit uses the next unit.
    let (unit_ns, unit) =
        UNITS.into_iter().find(|&(unit_ns, _)| u128::from(ns) * 2 < u128::from(unit_ns) * 1999).unwrap_or(UNITS[3]);
    let value = ns as f64 / unit_ns as f64;
    let digits = match value {
        _ if unit_ns == 1 => 0,
        v if v < 9.995 => 2,
        v if v < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.digits$}{unit}")
}

/// Formats a span of time, from two minutes on in minutes and seconds or hours and minutes.
pub fn format_span(ns: u64) -> String {
    const MINUTE_S: u64 = 60;
    let s = ns / 1_000_000_000;
    match s / MINUTE_S {
        0..2 => format_ns(ns),
        minutes @ 2..60 => format!("{minutes}m {}s", s % MINUTE_S),
        minutes => format!("{}h {}m", minutes / 60, minutes % 60),
    }
}

/// Formats a duration that a person chose, as such a person would type it, e.g. `10ms`; others like [`format_ns`].
pub fn format_round_ns(ns: u64) -> String {
    const S_NS: u64 = 1_000_000_000;
    const UNITS: [(u64, &str); 6] =
        [(3_600 * S_NS, "h"), (60 * S_NS, "m"), (S_NS, "s"), (1_000_000, "ms"), (1_000, "us"), (1, "ns")];
    let whole = UNITS.into_iter().find(|(unit_ns, _)| ns.is_multiple_of(*unit_ns) && ns > 0);
    match whole.map(|(unit_ns, unit)| (ns / unit_ns, unit)).filter(|(count, _)| *count < 10_000) {
        Some((count, unit)) => format!("{count}{unit}"),
        None => format_ns(ns),
    }
}

/// Makes text safe for terminals and web pages: characters that are not [`is_printable`] become `?`. Processes choose
/// their names, and users those of files, cgroups and functions.
pub fn printable(text: &(impl ToString + ?Sized)) -> String {
    text.to_string().chars().map(|c| if is_printable(c) { c } else { '?' }).collect()
}

/// Returns whether a character is displayed as itself. Not printable are control characters, bidirectional formatting
/// marks, line and paragraph separators, and invisible characters such as zero-width spaces, tags and variation
/// selectors (Cc, Zl, Zp, and Default_Ignorable_Code_Point of Unicode): a name could make the rest of its line show
/// other text, or look like another name.
pub fn is_printable(c: char) -> bool {
    match c {
        ' '..='~' => true,
        '\0'..='\x1f' | '\x7f'..='\u{9f}' | '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}'..='\u{1160}' => false,
        '\u{17b4}'..='\u{17b5}' | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' => false,
        '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}' => false,
        '\u{fff0}'..='\u{fffb}' | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}' => false,
        '\u{e0000}'..='\u{e0fff}' => false,
        _ => true,
    }
}

/// Returns whether a number is 0. Fields that are 0 are not serialized.
pub(crate) fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Returns a number of things, with an `s` unless there is one.
pub fn counted(count: u64, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// Wall-clock timestamps as RFC 3339 in UTC, with microsecond resolution.
pub mod rfc3339 {
    use jiff::Timestamp;
    use serde::{Deserialize, Deserializer, Serializer};

    /// Formats `unix_ns`.
    pub fn format(unix_ns: u64) -> String {
        match Timestamp::from_nanosecond(unix_ns.into()) {
            Ok(stamp) => format!("{stamp:.6}"),
            Err(_) => String::new(),
        }
    }

    /// Serializes for `#[serde(with = …)]`.
    ///
    /// # Errors
    /// Fails if the serializer does.
    pub fn serialize<S: Serializer>(unix_ns: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&format(*unix_ns))
    }

    /// Deserializes for `#[serde(with = …)]`.
    ///
    /// # Errors
    /// Fails if the text is not an RFC 3339 timestamp after 1970.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        let text = String::deserialize(deserializer)?;
        let stamp: Timestamp = text.parse().map_err(serde::de::Error::custom)?;
        u64::try_from(stamp.as_nanosecond()).map_err(serde::de::Error::custom)
    }
}

/// Figures in JSON: whole ones are integers, as most are counts.
pub(crate) mod figure {
    use std::collections::BTreeMap;

    use serde::{Serialize, Serializer};

    /// Larger integers are not exact in a float.
    const EXACT: f64 = (1u64 << 53) as f64;

    struct Figure(f64);

    impl Serialize for Figure {
        fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
            write(&self.0, to)
        }
    }

    /// Writes a figure.
    pub fn write<S: Serializer>(figure: &f64, to: S) -> Result<S::Ok, S::Error> {
        match *figure {
            figure if figure.fract() == 0.0 && figure.abs() <= EXACT => to.serialize_i64(figure as i64),
            figure => to.serialize_f64(figure),
        }
    }

    /// Writes a figure, or null.
    pub fn write_if_known<S: Serializer>(figure: &Option<f64>, to: S) -> Result<S::Ok, S::Error> {
        figure.map(Figure).serialize(to)
    }

    /// Writes figures by name.
    pub fn write_all<S: Serializer>(figures: &BTreeMap<String, f64>, to: S) -> Result<S::Ok, S::Error> {
        to.collect_map(figures.iter().map(|(name, &figure)| (name, Figure(figure))))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn parses_durations_with_units() {
        let s = 1_000_000_000;
        assert_eq!(parse_duration_ns("10s", None), Ok(10 * s));
        assert_eq!(parse_duration_ns("1.33ms", None), Ok(1_330_000));
        assert_eq!(parse_duration_ns("200us", None), Ok(200_000));
        assert_eq!(parse_duration_ns("5", Some(s)), Ok(5 * s));
        assert_eq!(parse_duration_ns(".5", Some(s)), Ok(s / 2));
        for bad in ["", "s", "-1s", "1 0s", "1x", "1e3", "..", "1s2", "٣s"] {
            for bare_unit_ns in [None, Some(s)] {
                assert_eq!(parse_duration_ns(bad, bare_unit_ns), Err(DurationError::Malformed), "{bad:?}");
            }
        }
        assert_eq!(parse_duration_ns("99999999999999d", None), Err(DurationError::TooLong));
    }

    #[test]
    fn chosen_durations_are_printed_as_they_are_typed() {
        for text in ["1h", "2m", "90s", "10ms", "1500us", "1ns"] {
            assert_eq!(parse_duration_ns(text, None).map(format_round_ns).as_deref(), Ok(text));
        }
        assert_eq!(format_round_ns(1_234_567), "1.23ms");
    }

    #[test]
    fn refuses_numbers_without_unit() {
        for text in ["5", "0.5", ".5", " 5 "] {
            assert_eq!(parse_duration_ns(text, None), Err(DurationError::NoUnit(text.trim().to_owned())));
        }
        let error = parse_duration_ns("5", None).map_err(|error| error.to_string());
        assert_eq!(error, Err("add a unit (5ms, 5s)".to_owned()));
        assert_eq!(parse_duration_ns("0", None), Ok(0));
    }

    #[test]
    fn formats_durations_with_three_digits() {
        for (ns, text) in [
            (0, "0ns"),
            (999, "999ns"),
            (1_000, "1.00us"),
            (999_499, "999us"),
            (999_500, "1.00ms"),
            (12_345_678, "12.3ms"),
            (61_000_000_000, "61.0s"),
        ] {
            assert_eq!(format_ns(ns), text);
        }
    }

    #[test]
    fn formats_minutes_and_hours() {
        let of = |s: u64| format_span(s * 1_000_000_000);
        assert_eq!([1, 119, 120, 3_725, 7_200, 57_605].map(of), ["1.00s", "119s", "2m 0s", "1h 2m", "2h 0m", "16h 0m"]);
        assert_eq!(format_span(0), "0ns");
    }

    #[test]
    fn neutralizes_escape_sequences_and_bidi_marks() {
        assert_eq!(printable("a\x1b[31mb\u{9b}c\n"), "a?[31mb?c?");
        // As a file named "gnp.exe" in reverse is shown.
        assert_eq!(printable("\u{202e}gnp"), "?gnp");
        let invisible = "\u{61c}\u{200b}\u{200c}\u{200d}\u{200e}\u{200f}\u{2028}\u{2029}\u{202a}\u{202b}\u{202c}\u{202d}\u{202e}\
            \u{2060}\u{2066}\u{2067}\u{2068}\u{2069}\u{feff}\u{e0001}\u{e0041}\u{e007f}\u{fe0f}\u{e0100}\u{ad}";
        assert!(printable(invisible).chars().all(|c| c == '?'), "{:?}", printable(invisible));
        let names = "kworker/0:1H-kblockd ~ é ß 漢字 Ελληνικά עברית عربى 한글 \u{a0}\u{300} 🐧 \u{fffd}";
        assert_eq!(printable(names), names);
    }

    #[test]
    fn timestamps_are_rfc3339() {
        assert_eq!(rfc3339::format(1_795_252_440_123_456_789), "2026-11-21T09:14:00.123456Z");
    }

    proptest! {
        #[test]
        fn parse_duration_never_panics(text in ".*") {
            let _ = (parse_duration_ns(&text, None), parse_duration_ns(&text, Some(1)));
        }
    }
}

// SPDX-License-Identifier: MIT OR Apache-2.0
//! Parses times that users type: `10:00`, `10m ago`, `yesterday 14:30`, `2026-11-26 10:00`, RFC 3339, or seconds since
//! 1970.

use jiff::civil::{Date, DateTime, Time};
use jiff::tz::TimeZone;
use jiff::{Span, Timestamp, ToSpan as _, Zoned};
use whylate_model::units::parse_duration_ns;

/// Error message.
const EXPECTED: &str = "give a time such as 10:00, 10m ago, yesterday 14:30, 2026-11-26 10:00 or an RFC 3339 timestamp";

/// A time as typed. The day of a time of day depends on the recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Given {
    /// An absolute time, in nanoseconds since 1970.
    At(u64),
    /// A time of day: of the first day on which the recording has it.
    OfDay(Time),
}

/// Parses a time, in the system's time zone unless the text has an offset.
///
/// # Errors
/// Fails if the text is not a time.
pub fn given(text: &str) -> Result<Given, String> {
    parse(text.trim(), &Zoned::now()).ok_or_else(|| EXPECTED.to_owned())
}

fn parse(text: &str, now: &Zoned) -> Option<Given> {
    let zone = now.time_zone();
    let at = |stamp: Timestamp| u64::try_from(stamp.as_nanosecond()).ok().map(Given::At);
    let on = |date: Date, time: Time| at(date.to_datetime(time).to_zoned(zone.clone()).ok()?.timestamp());
    if let Some(length) = text.strip_suffix("ago") {
        let ns = i64::try_from(parse_duration_ns(length.trim(), None).ok()?).ok()?;
        return at(now.timestamp().checked_sub(Span::new().try_nanoseconds(ns).ok()?).ok()?);
    }
    if text == "now" {
        return at(now.timestamp());
    }
    for (word, days) in [("today", 0), ("yesterday", 1)] {
        if let Some(rest) = text.strip_prefix(word) {
            let date = now.date().checked_sub(days.days()).ok()?;
            let rest = rest.trim();
            return on(date, if rest.is_empty() { Time::midnight() } else { time(rest)? });
        }
    }
    if let Some(time) = time(text) {
        return Some(Given::OfDay(time));
    }
    if let Some(seconds) = text.parse::<f64>().ok().filter(|seconds| (1e8..1e11).contains(seconds)) {
        return Some(Given::At((seconds * 1e9) as u64));
    }
    // With an offset, the time zone does not matter.
    if let Ok(stamp) = text.parse::<Timestamp>() {
        return at(stamp);
    }
    let instant = text.parse::<DateTime>().ok()?;
    on(instant.date(), instant.time())
}

/// Parses `10:00` or `10:00:30.5`.
fn time(text: &str) -> Option<Time> {
    // jiff would take a bare number as an hour, and the time of a text with date and time.
    let is_time = text.contains(':') && text.chars().all(|c| c.is_ascii_digit() || matches!(c, ':' | '.'));
    is_time.then(|| text.parse().ok())?
}

impl Given {
    /// Returns nanoseconds since 1970, for a recording that starts at `first_unix_ns`.
    pub fn within(&self, first_unix_ns: u64, zone: &TimeZone) -> Option<u64> {
        let of_day = match self {
            Given::At(ns) => return Some(*ns),
            Given::OfDay(time) => *time,
        };
        let first = Timestamp::from_nanosecond(first_unix_ns.into()).ok()?.to_zoned(zone.clone());
        // In a recording that starts at 23:50, 00:10 means the next day.
        let mut date = first.date();
        if of_day < first.time().with().subsec_nanosecond(0).build().ok()?.with().second(0).build().ok()? {
            date = date.tomorrow().ok()?;
        }
        let instant = date.to_datetime(of_day).to_zoned(zone.clone()).ok()?;
        u64::try_from(instant.timestamp().as_nanosecond()).ok()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn now() -> Zoned {
        "2026-11-26T10:30:00+01:00[Europe/Berlin]".parse().expect("in range")
    }

    fn parsed(text: &str) -> String {
        match parse(text, &now()) {
            None => "-".to_owned(),
            Some(given) => {
                let first = now().checked_sub(8.hours()).expect("in range");
                let ns = given.within(first.timestamp().as_nanosecond() as u64, now().time_zone()).expect("in range");
                Timestamp::from_nanosecond(ns.into()).expect("in range").to_string()
            }
        }
    }

    #[test]
    fn parses_times_as_users_type_them() {
        for (text, stamp) in [
            ("10:00", "2026-11-26T09:00:00Z"),
            // The recording starts at 02:30.
            ("02:30", "2026-11-26T01:30:00Z"),
            ("01:00", "2026-11-27T00:00:00Z"),
            ("10m ago", "2026-11-26T09:20:00Z"),
            ("1h ago", "2026-11-26T08:30:00Z"),
            ("yesterday", "2026-11-24T23:00:00Z"),
            ("yesterday 14:30", "2026-11-25T13:30:00Z"),
            ("today 00:10:05", "2026-11-25T23:10:05Z"),
            ("2026-11-26 10:00", "2026-11-26T09:00:00Z"),
            ("2026-11-26T10:00:00Z", "2026-11-26T10:00:00Z"),
            ("2026-11-26T10:00:00+02:00", "2026-11-26T08:00:00Z"),
            ("1795688000", "2026-11-26T10:13:20Z"),
        ] {
            assert_eq!(parsed(text), stamp, "{text}");
        }
        for text in ["", "x", "25:00", "10", "10 ago", "-5m ago", "tomorrow", "yesterday x"] {
            assert_eq!(parsed(text), "-", "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_input_panics(text in ".{0,40}") {
            let _ = given(&text);
        }
    }
}

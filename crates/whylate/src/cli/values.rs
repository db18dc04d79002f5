// SPDX-License-Identifier: MIT OR Apache-2.0
//! Parsers of option values that several commands share, and quoting of words in displayed commands.

use std::str::FromStr;

use whylate_model::sources::{CARDS, named};
use whylate_model::units::parse_duration_ns;
use whylate_sources::kernel::cpus;
use whylate_sources::timerlat::PERIODS_NS;

use crate::store::Span;
use crate::store::times::given;

/// Parses the name of a source.
///
/// # Errors
/// Fails if the name is unknown; lists the names of all sources.
pub fn source(text: &str) -> Result<String, String> {
    let known = || CARDS.map(|card| card.name).join(", ");
    named(text).map(|card| card.name.to_owned()).ok_or_else(|| format!("choose from: {}", known()))
}

/// Parses a PID or a TID.
pub fn pid(text: &str) -> Result<u32, String> {
    text.parse().ok().filter(|&pid| pid > 0).ok_or_else(|| "give the number that ps shows, not a name".to_owned())
}

/// Parses a duration with its unit into nanoseconds.
pub fn duration_ns(text: &str) -> Result<u64, String> {
    positive(text, None)
}

/// Parses a duration into nanoseconds; a bare number is in seconds, as an interval of vmstat(8).
pub fn seconds_ns(text: &str) -> Result<u64, String> {
    positive(text, Some(1_000_000_000))
}

/// Parses a latency of rtla's into nanoseconds; a bare number is in microseconds.
pub fn us(text: &str) -> Result<u64, String> {
    positive(text, Some(1_000))
}

fn positive(text: &str, bare_unit_ns: Option<u64>) -> Result<u64, String> {
    match parse_duration_ns(text, bare_unit_ns) {
        Ok(0) => Err("it must be more than zero".to_owned()),
        Ok(ns) => Ok(ns),
        Err(error) => Err(error.to_string()),
    }
}

/// Parses two times separated by dots; one of them may be missing.
pub fn span(text: &str) -> Result<Span, String> {
    let how = "give two times, e.g. 10:00..10:05";
    let (from, to) = text.split_once("..").ok_or(how)?;
    let time = |text: &str| if text.trim().is_empty() { Ok(None) } else { given(text).map(Some) };
    match (time(from)?, time(to)?) {
        (None, None) => Err(how.to_owned()),
        (from, to) => Ok(Span { from, to }),
    }
}

/// Parses two times separated by dots, or the single time at which the span both begins and ends.
pub fn at(text: &str) -> Result<Span, String> {
    if text.contains("..") {
        return span(text);
    }
    given(text).map(|time| Span { from: Some(time.clone()), to: Some(time) })
}

/// Parses a number of bytes, e.g. `500M` or `2G`, in powers of 1,024.
pub fn bytes(text: &str) -> Result<u64, String> {
    let how = || "give a size such as 500M or 2G".to_owned();
    let text = text.trim();
    let plain = text.trim_end_matches(['B', 'i', 'b']);
    let (number, power) = match plain.chars().last() {
        Some(unit @ ('k' | 'K' | 'M' | 'm' | 'G' | 'g' | 'T' | 't')) => {
            (&plain[..plain.len() - 1], "KMGT".find(unit.to_ascii_uppercase()).map_or(0, |at| at as u32 + 1))
        }
        _ => (plain, 0),
    };
    let number: f64 = number.trim().parse().map_err(|_| how())?;
    let all = number * 1024_f64.powi(power as i32);
    if (1.0..1e18).contains(&all) { Ok(all as u64) } else { Err(how()) }
}

/// Parses a timer period with its unit into nanoseconds.
pub fn period(text: &str) -> Result<u64, String> {
    within_limits(duration_ns(text)?)
}

/// Parses a timer period into nanoseconds; a bare number is in microseconds, as rtla's.
pub fn period_us(text: &str) -> Result<u64, String> {
    within_limits(us(text)?)
}

fn within_limits(period_ns: u64) -> Result<u64, String> {
    let is_possible = PERIODS_NS.contains(&period_ns);
    is_possible.then_some(period_ns).ok_or_else(|| "a period is from 100 us to 1 s long".to_owned())
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cpus(pub Vec<u32>);

impl FromStr for Cpus {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut cpus = cpus::numbers(text).filter(|cpus| !cpus.is_empty()).ok_or("CPUs are listed like this: 0,2-5")?;
        cpus.sort_unstable();
        cpus.dedup();
        Ok(Cpus(cpus))
    }
}

/// Parses a percentage into millionths.
pub fn share_ppm(text: &str) -> Result<u32, String> {
    let percent: f64 = text.trim_end_matches('%').trim().parse().map_err(|_| "give a percentage, such as 1%")?;
    if !(0.001..=100.0).contains(&percent) {
        return Err("give a percentage from 0.001 to 100".to_owned());
    }
    Ok((percent * 10_000.0) as u32)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn bare_numbers_have_a_unit_or_are_refused() {
        assert_eq!((us("40"), us("1.5ms")), (Ok(40_000), Ok(1_500_000)));
        assert_eq!((seconds_ns("5"), seconds_ns("5ms")), (Ok(5_000_000_000), Ok(5_000_000)));
        assert_eq!((duration_ns("5s"), duration_ns("5")), (Ok(5_000_000_000), Err("add a unit (5ms, 5s)".to_owned())));
        for parse in [us, seconds_ns, duration_ns] {
            assert!(parse("0").is_err() && parse("x").is_err() && parse("-1").is_err());
        }
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!((bytes("500M"), bytes("2GiB"), bytes("1.5k")), (Ok(500 << 20), Ok(2 << 30), Ok(1536)));
        assert!(bytes("0").is_err() && bytes("x").is_err() && bytes("-1M").is_err() && bytes("").is_err());
    }

    #[test]
    fn rejects_periods_outside_kernel_limits() {
        assert_eq!((period_us("100"), period("1s")), (Ok(100_000), Ok(1_000_000_000)));
        assert!(period_us("99").is_err() && period_us("1000001").is_err() && period("100").is_err());
    }

    #[test]
    fn span_needs_one_end() {
        let ends = |text: &str| span(text).map(|span| (span.from.is_some(), span.to.is_some()));
        assert_eq!(ends("10:00..10:05"), Ok((true, true)));
        assert_eq!(ends("2026-11-26T10:00:00.5Z..2026-11-26 10:05"), Ok((true, true)));
        assert_eq!((ends("..10:05"), ends("1h ago .. ")), (Ok((false, true)), Ok((true, false))));
        for text in ["", "..", "10:00", "10:00..x", "x..10:00", "10:00..10:05..10:06"] {
            assert!(span(text).is_err(), "{text}");
        }
        let one = at("10:00").expect("a time");
        assert!(one.from.is_some() && one.from == one.to);
        assert!(at("10:00..").is_ok() && at("x").is_err() && at("..").is_err());
    }

    #[test]
    fn lists_of_cpus_are_sorted() {
        assert_eq!("3,0-1,1".parse(), Ok(Cpus(vec![0, 1, 3])));
        for text in ["", "x", "1-", "3-1", "-1"] {
            assert!(text.parse::<Cpus>().is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn parsers_never_panic(text in ".{0,40}") {
            let _ = (duration_ns(&text), us(&text), seconds_ns(&text), bytes(&text), text.parse::<Cpus>());
        }
    }
}

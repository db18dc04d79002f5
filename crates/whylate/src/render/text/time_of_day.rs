// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders a timestamp for text output: local time of day. JSON has date and UTC.

use jiff::Timestamp;
use jiff::tz::TimeZone;

/// Renders the time of day in `zone`, to the microsecond.
pub fn time_of_day(unix_ns: u64, zone: &TimeZone) -> String {
    in_zone(unix_ns, zone, "%H:%M:%S%.6f")
}

/// Renders a timestamp in `zone`.
pub fn in_zone(unix_ns: u64, zone: &TimeZone, format: &str) -> String {
    let stamp = Timestamp::from_nanosecond(unix_ns.into());
    stamp.map_or_else(|_| String::new(), |at| at.to_zoned(zone.clone()).strftime(format).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_of_day_is_in_zone() {
        let at_unix_ns = 1_795_252_440_123_456_789;
        assert_eq!(time_of_day(at_unix_ns, &TimeZone::UTC), "09:14:00.123456");
        let zone = TimeZone::fixed(jiff::tz::offset(2));
        assert_eq!(time_of_day(at_unix_ns, &zone), "11:14:00.123456");
    }
}

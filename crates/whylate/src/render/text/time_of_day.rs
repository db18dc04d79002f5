// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders a timestamp for text output: local time of day. JSON has date and UTC.

use jiff::Timestamp;
use jiff::tz::TimeZone;

/// Renders the time of day in `zone`, to the microsecond.
pub fn time_of_day(unix_ns: u64, zone: &TimeZone) -> String {
    match Timestamp::from_nanosecond(unix_ns.into()) {
        Ok(stamp) => stamp.to_zoned(zone.clone()).strftime("%H:%M:%S%.6f").to_string(),
        Err(_) => String::new(),
    }
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

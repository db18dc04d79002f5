// SPDX-License-Identifier: MIT OR Apache-2.0
//! Parsers of option values of timerlat.

use std::path::PathBuf;
use std::str::FromStr;

use whylate_model::units::parse_duration_ns;
use whylate_sources::timerlat::{PERIODS_NS, Policy};

/// Parses the offset between wakeups of successive CPUs into nanoseconds; a bare number is in microseconds.
pub fn offset(text: &str) -> Result<u64, String> {
    match parse_duration_ns(text, Some(1_000)) {
        Ok(ns) if ns <= *PERIODS_NS.end() => Ok(ns),
        Ok(_) => Err("it is 1 s at most".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// Parses `o:nice`, `r:priority`, `f:priority` or `d:runtime:period`. Like rtla, accepts capital letters too.
pub fn policy(text: &str) -> Result<Policy, String> {
    let wrong = "a priority is o:NICE, r:PRIORITY, f:PRIORITY or d:RUNTIME:PERIOD, e.g. f:95 or d:500us:1ms";
    let (class, rest) = text.split_once(':').ok_or(wrong)?;
    let real_time = || match rest.parse() {
        Ok(priority @ 1..=99) => Ok(priority),
        _ => Err("a real-time priority is from 1 to 99"),
    };
    let length_ns = |text: &str| parse_duration_ns(text, Some(1)).ok().filter(|&ns| ns > 0).ok_or(wrong);
    match class.to_ascii_lowercase().as_str() {
        "o" => match rest.parse() {
            Ok(nice @ -20..=19) => Ok(Policy::Other(nice)),
            _ => Err("a nice value is from -20 to 19".to_owned()),
        },
        "r" => Ok(Policy::RoundRobin(real_time()?)),
        "f" => Ok(Policy::Fifo(real_time()?)),
        "d" => {
            let (runtime, period) = rest.split_once(':').ok_or(wrong)?;
            let (runtime_ns, period_ns) = (length_ns(runtime)?, length_ns(period)?);
            if runtime_ns > period_ns {
                return Err("the runtime of a deadline thread must fit into its period".to_owned());
            }
            Ok(Policy::Deadline { runtime_ns, period_ns })
        }
        _ => Err(wrong.to_owned()),
    }
}

/// What to do when a threshold is hit, or at the end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Save the trace to a file.
    Trace(PathBuf),
    /// Send a signal to a process.
    Signal {
        number: i32,
        /// `None` for the parent.
        pid: Option<i32>,
    },
    /// Run a command in a shell.
    Shell(String),
    /// Go on measuring.
    Continue,
}

impl Action {
    pub fn is_trace(&self) -> bool {
        matches!(self, Action::Trace(_))
    }
}

/// Default file name of traces.
pub const TRACE_FILE: &str = "timerlat_trace.txt";

impl FromStr for Action {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (what, rest) = text.split_once(',').map_or((text, None), |(what, rest)| (what, Some(rest)));
        match (what, rest) {
            ("trace", None) => Ok(Action::Trace(TRACE_FILE.into())),
            ("trace", Some(rest)) => match rest.strip_prefix("file=") {
                Some(file) if !file.is_empty() => Ok(Action::Trace(file.into())),
                _ => Err("it is trace or trace,file=FILE".to_owned()),
            },
            // A command may have commas.
            ("shell", Some(rest)) => match rest.strip_prefix("command=") {
                Some(command) if !command.is_empty() => Ok(Action::Shell(command.to_owned())),
                _ => Err("it is shell,command=COMMAND".to_owned()),
            },
            ("signal", Some(rest)) => {
                signal(rest).ok_or_else(|| "it is signal,num=NUMBER,pid=PID, or pid=parent".to_owned())
            }
            ("continue", None) => Ok(Action::Continue),
            _ => Err("an action is trace, signal, shell or continue".to_owned()),
        }
    }
}

fn signal(text: &str) -> Option<Action> {
    let (mut number, mut target) = (None, None);
    for part in text.split(',') {
        match part.split_once('=')? {
            ("num", value) => number = value.parse().ok().filter(|number| (1..=64).contains(number)),
            ("pid", "parent") => target = Some(None),
            ("pid", value) => target = Some(Some(value.parse().ok().filter(|&pid: &i32| pid > 0)?)),
            _ => return None,
        }
    }
    Some(Action::Signal { number: number?, pid: target? })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn parses_offsets() {
        assert_eq!((offset("0"), offset("20"), offset("1ms")), (Ok(0), Ok(20_000), Ok(1_000_000)));
        assert!(offset("1001ms").is_err() && offset("-1").is_err() && offset("x").is_err());
    }

    #[test]
    fn parses_scheduling_policies() {
        assert_eq!(policy("o:-5"), Ok(Policy::Other(-5)));
        assert_eq!(policy("r:1"), Ok(Policy::RoundRobin(1)));
        assert_eq!(policy("f:95"), Ok(Policy::Fifo(95)));
        assert_eq!(policy("d:500us:1ms"), Ok(Policy::Deadline { runtime_ns: 500_000, period_ns: 1_000_000 }));
        assert_eq!(
            [policy("F:1"), policy("R:2"), policy("O:3")],
            [Ok(Policy::Fifo(1)), Ok(Policy::RoundRobin(2)), Ok(Policy::Other(3))]
        );
        assert_eq!(policy("D:500:1000"), Ok(Policy::Deadline { runtime_ns: 500, period_ns: 1_000 }));
        for text in ["", "f", "f:0", "f:100", "r:x", "o:20", "d:1ms", "d:2ms:1ms", "x:1", "f:95:1"] {
            assert!(policy(text).is_err(), "{text}");
        }
    }

    #[test]
    fn parses_actions() {
        assert_eq!("trace".parse(), Ok(Action::Trace(TRACE_FILE.into())));
        assert_eq!("trace,file=a b".parse(), Ok(Action::Trace("a b".into())));
        assert_eq!("signal,num=2,pid=parent".parse(), Ok(Action::Signal { number: 2, pid: None }));
        assert_eq!("signal,pid=77,num=15".parse(), Ok(Action::Signal { number: 15, pid: Some(77) }));
        assert_eq!("shell,command=echo a,b".parse(), Ok(Action::Shell("echo a,b".to_owned())));
        assert_eq!("continue".parse(), Ok(Action::Continue));
        for text in [
            "",
            "trace,",
            "trace,file=",
            "signal",
            "signal,num=2",
            "signal,num=0,pid=1",
            "signal,num=9,pid=-1",
            "shell",
            "stop",
        ] {
            assert!(text.parse::<Action>().is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn parsers_never_panic(text in ".{0,40}") {
            let _ = (offset(&text), policy(&text), text.parse::<Action>());
        }
    }
}

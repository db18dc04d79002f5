// SPDX-License-Identifier: MIT OR Apache-2.0
//! Names of other tools, and the commands that take their place.

/// Name of a tool, what it belongs to, and the command.
const TOOLS: [(&str, &str, &str); 28] = [
    ("offcputime", "bcc", "whylate offcpu -d 10s"),
    ("offwaketime", "bcc", "whylate offcpu --wakers -d 10s"),
    ("wakeuptime", "bcc", "whylate offcpu --wakers -d 10s"),
    ("runqlat", "bcc", "whylate offcpu --why 1ms -d 10s"),
    ("runqslower", "bcc", "whylate offcpu --why 10ms -d 10s"),
    ("biolatency", "bcc", "whylate block 1 10"),
    ("biosnoop", "bcc", "whylate block --slower 1ms"),
    ("biotop", "bcc", "whylate block --table --by process 1"),
    ("hardirqs", "bcc", "whylate irqsoff 10 1"),
    ("criticalstat", "bcc", "whylate irqsoff --slower 1ms"),
    ("wqlat", "bcc", "whylate wq 1"),
    ("sched", "perf", "whylate offcpu --why 1ms -d 10s"),
    ("timehist", "perf", "whylate offcpu --why 1ms -d 10s"),
    ("trace", "perf", "whylate -p PID"),
    ("strace", "Linux", "whylate -p PID"),
    ("time", "Linux", "whylate run -- COMMAND"),
    ("rtla", "Linux", "whylate timerlat"),
    ("osnoise", "rtla", "whylate timerlat"),
    ("cyclictest", "rt-tests", "whylate timerlat"),
    ("preemptoff", "ftrace", "whylate irqsoff --preempt"),
    ("preemptirqsoff", "ftrace", "whylate irqsoff --preempt"),
    ("wakeup_rt", "ftrace", "whylate timerlat"),
    ("hung_task", "Linux", "whylate offcpu --blocked 10s"),
    ("blktrace", "Linux", "whylate block --slower 1ms"),
    ("iotop", "Linux", "whylate block --table --by process 1"),
    ("latencytop", "Linux", "whylate offcpu -d 10s"),
    ("atop", "Linux", "whylate record"),
    ("below", "Linux", "whylate record"),
];

/// Returns advice to users of another tool.
pub fn advice(name: &str) -> Option<String> {
    let (_, of, command) = TOOLS.iter().find(|(tool, ..)| *tool == name)?;
    Some(format!("{name} is a tool of {of}: use `{command}`"))
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use crate::cli::parser::parse_words;

    use super::*;

    #[test]
    fn each_advice_is_a_command() {
        for (tool, _, command) in TOOLS {
            let words = command.replace("PID", "1").replace("COMMAND", "true");
            let words: Vec<OsString> = words.split(' ').skip(1).map(OsString::from).collect();
            let parsed = parse_words(&words);
            assert!(parsed.is_ok(), "{command}: {:?}", parsed.err());
            let error = parse_words(&[tool.into(), "10".into()]).expect_err("no command of whylate").to_string();
            assert!(error.contains(command) && error.trim_end().lines().count() == 1, "{error}");
        }
    }
}

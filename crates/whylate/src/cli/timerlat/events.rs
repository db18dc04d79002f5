// SPDX-License-Identifier: MIT OR Apache-2.0
//! `-e`, `--filter` and `--trigger`; filter and trigger belong to the preceding event on the command line.

use clap::{Arg, ArgAction, ArgMatches, Args, Command, Error, FromArgMatches, error::ErrorKind};
use whylate_sources::timerlat::TraceEvent;

/// The events to record, in the order of the command line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Events(pub Vec<TraceEvent>);

const EVENT: &str = "event";
const FILTER: &str = "filter";
const TRIGGER: &str = "trigger";

impl Args for Events {
    fn augment_args(command: Command) -> Command {
        let option =
            |id: &'static str, value: &'static str| Arg::new(id).long(id).value_name(value).action(ArgAction::Append);
        let event = option(EVENT, "SYSTEM[:EVENT]").short('e');
        command
            .arg(event.help("With -t or -a: trace this event too (needs the kernel's timerlat tracer)"))
            .arg(option(FILTER, "FILTER").requires(EVENT).help("Filter for the preceding event, in kernel syntax"))
            .arg(option(TRIGGER, "TRIGGER").requires(EVENT).help(
                "Trigger for the preceding event, in kernel syntax; the histogram of a hist: trigger is saved to SYSTEM_EVENT_hist.txt",
            ))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Events {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let mut words = Vec::new();
        for id in [EVENT, FILTER, TRIGGER] {
            let values = matches.get_many::<String>(id).into_iter().flatten();
            words.extend(matches.indices_of(id).into_iter().flatten().zip(values.map(move |value| (id, value))));
        }
        words.sort_unstable();
        let mut events: Vec<TraceEvent> = Vec::new();
        for (_, (id, value)) in words {
            if id == EVENT {
                events.push(event(value).map_err(|message| Error::raw(ErrorKind::ValueValidation, message))?);
                continue;
            }
            let refused = |message| Error::raw(ErrorKind::MissingRequiredArgument, message);
            let last = events.last_mut().ok_or_else(|| refused(format!("write --{id} after the -e of its event\n")))?;
            let place = if id == FILTER { &mut last.filter } else { &mut last.trigger };
            if place.replace(value.clone()).is_some() {
                return Err(refused(format!("an event can have only one --{id}\n")));
            }
        }
        Ok(Events(events))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Parses `system:event`, or `system` for all of its events.
fn event(text: &str) -> Result<TraceEvent, String> {
    let (system, name) = text.split_once(':').map_or((text, None), |(system, name)| (system, Some(name)));
    // System and event are directory names in tracefs.
    let is_name = |name: &str| !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "_-".contains(c));
    if !is_name(system) || !name.is_none_or(is_name) {
        return Err(format!("name an event SYSTEM or SYSTEM:EVENT, e.g. sched:sched_switch, not {text}\n"));
    }
    Ok(TraceEvent { system: system.to_owned(), name: name.map(str::to_owned), filter: None, trigger: None })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(words: &[&str]) -> Result<Vec<TraceEvent>, Error> {
        crate::cli::parsed(words.iter().copied()).map(|Events(events)| events)
    }

    fn named(system: &str, name: Option<&str>) -> TraceEvent {
        TraceEvent { system: system.to_owned(), name: name.map(str::to_owned), filter: None, trigger: None }
    }

    #[test]
    fn filters_and_triggers_apply_to_preceding_event() {
        let words = [
            "-e",
            "sched:sched_switch",
            "--filter",
            "prev_prio<100",
            "-e",
            "irq",
            "--event=a:b",
            "--trigger",
            "hist:key=c",
        ];
        let first = TraceEvent { filter: Some("prev_prio<100".to_owned()), ..named("sched", Some("sched_switch")) };
        let last = TraceEvent { trigger: Some("hist:key=c".to_owned()), ..named("a", Some("b")) };
        assert_eq!(parse(&words).expect("parsed"), [first, named("irq", None), last]);
        assert_eq!(parse(&[]).expect("parsed"), []);
    }

    #[test]
    fn rejects_filter_or_trigger_without_event() {
        for words in [
            &["--filter", "a"][..],
            &["--filter", "a", "-e", "sched"],
            &["-e", "sched", "--filter", "a", "--filter", "b"],
            &["-e", "../../etc:passwd"],
            &["-e", "sched:"],
            &["-e", ""],
        ] {
            assert!(parse(words).is_err(), "{words:?}");
        }
    }

    proptest! {
        #[test]
        fn event_names_cannot_escape_directory(text in "[a-z_./:-]{1,12}") {
            if let Ok(event) = event(&text) {
                let names = [Some(event.system), event.name];
                prop_assert!(names.iter().flatten().all(|name| !name.contains(['/', '.']) && !name.is_empty()));
            }
        }
    }
}

// SPDX-License-Identifier: MIT OR Apache-2.0
//! Thread states, in the letters of ps(1), and F for frozen threads.

use whylate_model::wait::State;

use super::skel::types::thread_state;
use crate::source::AttachError;

const STATES: [(thread_state, State); 11] = [
    (thread_state::STATE_ON_CPU, State::OnCpu),
    (thread_state::STATE_READY, State::Ready),
    (thread_state::STATE_THROTTLED, State::Throttled),
    (thread_state::STATE_SLEEPING, State::Sleeping),
    (thread_state::STATE_UNINTERRUPTIBLE, State::Uninterruptible),
    (thread_state::STATE_IDLE, State::Idle),
    (thread_state::STATE_STOPPED, State::Stopped),
    (thread_state::STATE_TRACED, State::Traced),
    (thread_state::STATE_PARKED, State::Parked),
    (thread_state::STATE_FROZEN, State::Frozen),
    (thread_state::STATE_OTHER, State::Other),
];

/// Converts a `thread_state` of the BPF programs.
pub(super) fn from_number(number: u8) -> State {
    STATES.iter().find(|(state, _)| state.0 == u32::from(number)).map_or(State::Other, |&(_, state)| state)
}

pub(super) fn bit(wanted: State) -> u32 {
    STATES.iter().filter(|(_, state)| *state == wanted).fold(0, |bits, (state, _)| bits | 1 << state.0)
}

/// Returns a bit mask of the states that the letters stand for; all states if there are no letters.
pub(super) fn mask(letters: &str) -> Result<u32, AttachError> {
    if letters.is_empty() {
        return Ok(u32::MAX);
    }
    let mut mask = 0;
    for letter in letters.chars().filter(|&letter| letter != ',') {
        let bits =
            STATES.iter().filter(|(_, state)| state.letter() == letter).fold(0, |bits, (state, _)| bits | 1 << state.0);
        if bits == 0 {
            return Err(AttachError::Unsupported(format!(
                "{letter} is no state of a thread (choose from R, S, D, I, T, t, P, F)"
            )));
        }
        mask |= bits;
    }
    Ok(mask)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_state_letters() {
        let bit = |state: thread_state| 1 << state.0;
        assert_eq!(mask("D").ok(), Some(bit(thread_state::STATE_UNINTERRUPTIBLE)));
        assert_eq!(
            mask("S,R").ok(),
            Some(
                bit(thread_state::STATE_SLEEPING)
                    | bit(thread_state::STATE_READY)
                    | bit(thread_state::STATE_THROTTLED)
                    | bit(thread_state::STATE_ON_CPU)
            )
        );
        assert_eq!(mask("").ok(), Some(u32::MAX));
        assert!(mask("X").is_err());
    }
}

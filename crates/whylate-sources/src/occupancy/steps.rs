// SPDX-License-Identifier: MIT OR Apache-2.0
//! Programs of sources that the account's own program calls, so that one program comes in at an event for all of them.

use std::cell::RefCell;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::rc::{Rc, Weak};

use anyhow::anyhow;
use libbpf_rs::{MapCore as _, MapFlags};

use super::skel::OccupancySkel;
use super::skel::types::{switch_step, waking_step};
use super::{Account, Kept};
use crate::source::AttachError;

/// A program that the account calls, by its source and event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Step {
    /// A measured thread gets the CPU.
    TimerlatSwitch,
    /// A thread of io_uring gets the CPU, or leaves it.
    SqpollSwitch,
    /// A thread gets the CPU that has had none for so long.
    RunnableSwitch {
        /// In nanoseconds, by the scheduler's clock.
        over_ns: u64,
    },
    /// A thread of io_uring is woken.
    SqpollWaking,
}

impl Step {
    /// Where its program is among those of the event.
    fn position(self) -> u32 {
        match self {
            Step::TimerlatSwitch => switch_step::STEP_TIMERLAT.0,
            Step::SqpollSwitch => switch_step::STEP_SQPOLL.0,
            Step::RunnableSwitch { .. } => switch_step::STEP_RUNNABLE.0,
            Step::SqpollWaking => waking_step::WAKING_STEP_SQPOLL.0,
        }
    }
}

/// The account calls a program until this is dropped.
pub(crate) struct Called {
    kept: Weak<RefCell<Kept>>,
    step: Step,
}

impl Account {
    /// From now on, once it is attached itself, it calls this program.
    ///
    /// # Errors
    /// When another source has such a program, or the kernel refuses it.
    pub(crate) fn call(&self, step: Step, program: BorrowedFd<'_>) -> Result<Called, AttachError> {
        let mut kept = self.kept.borrow_mut();
        if kept.steps.iter().any(|other| std::mem::discriminant(other) == std::mem::discriminant(&step)) {
            return Err(AttachError::Failed(anyhow!("attach this source once beside others")));
        }
        let program = program.as_raw_fd().to_ne_bytes();
        kept.map_of(step).update(&step.position().to_ne_bytes(), &program, MapFlags::ANY)?;
        if let Step::RunnableSwitch { over_ns } = step {
            kept.explain_waits_over(over_ns);
        }
        kept.steps.insert(step);
        Ok(Called { kept: Rc::downgrade(&self.kept), step })
    }
}

impl Kept {
    fn map_of(&self, step: Step) -> &libbpf_rs::MapMut<'static> {
        match step {
            Step::SqpollWaking => &self.skeleton.maps.steps_of_waking,
            _ => &self.skeleton.maps.steps_of_switch,
        }
    }

    fn explain_waits_over(&mut self, over_ns: u64) {
        if let Some(data) = self.skeleton.maps.bss_data.as_deref_mut() {
            data.explain_waits_over_ns = over_ns;
        }
    }
}

impl Drop for Called {
    fn drop(&mut self) {
        // With the account, what it calls is gone as well.
        let Some(kept) = self.kept.upgrade() else { return };
        let mut kept = kept.borrow_mut();
        kept.steps.remove(&self.step);
        if let Step::RunnableSwitch { .. } = self.step {
            kept.explain_waits_over(0);
        }
        // It can only be gone already.
        let _ = kept.map_of(self.step).delete(&self.step.position().to_ne_bytes());
    }
}

/// Programs of sources call the account's again.
pub(super) fn goes_on_with(skeleton: &OccupancySkel<'_>) -> Result<(), AttachError> {
    let program = skeleton.progs.on_sched_switch_after_step.as_fd().as_raw_fd().to_ne_bytes();
    let position = switch_step::STEP_ACCOUNT.0.to_ne_bytes();
    Ok(skeleton.maps.steps_of_switch.update(&position, &program, MapFlags::ANY)?)
}

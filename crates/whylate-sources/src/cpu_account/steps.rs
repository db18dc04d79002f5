// SPDX-License-Identifier: MIT OR Apache-2.0
//! Programs of sources that the account's program tail-calls, so that only one program per tracepoint is attached.

use std::cell::RefCell;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::rc::{Rc, Weak};

use anyhow::anyhow;
use libbpf_rs::{MapCore as _, MapFlags, ProgramMut};

use super::skel::OccupancySkel;
use super::skel::types::{switch_step, vector_step, waking_step};
use super::{Account, AccountState};
use crate::kernel::attach;
use crate::kernel::error::AttachError;

/// A source's program that the account calls, by source and tracepoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Step {
    /// A measured thread is switched in.
    TimerlatSwitch,
    /// A thread of io_uring is switched in or out.
    SqpollSwitch,
    /// A thread is switched in after it was off-CPU for at least `over_ns`.
    RunnableSwitch {
        /// Off-CPU time in nanoseconds, on the scheduler's clock.
        over_ns: u64,
    },
    /// A thread of io_uring is woken.
    SqpollWaking,
    /// An interrupt that no device has raised begins.
    TicksVectorEntry,
    /// It ends.
    TicksVectorExit,
}

impl Step {
    /// Returns the index of the program in the tracepoint's program array.
    fn position(self) -> u32 {
        match self {
            Step::TimerlatSwitch => switch_step::STEP_TIMERLAT.0,
            Step::SqpollSwitch => switch_step::STEP_SQPOLL.0,
            Step::RunnableSwitch { .. } => switch_step::STEP_RUNNABLE.0,
            Step::SqpollWaking => waking_step::WAKING_STEP_SQPOLL.0,
            Step::TicksVectorEntry => vector_step::VECTOR_STEP_ENTRY.0,
            Step::TicksVectorExit => vector_step::VECTOR_STEP_EXIT.0,
        }
    }
}

/// Keeps a program registered with the account until dropped.
pub(crate) struct StepGuard {
    state: Weak<RefCell<AccountState>>,
    step: Step,
}

impl Account {
    /// Registers `program`, which the account calls from now on while it is attached. Its descriptor is closed.
    ///
    /// # Errors
    /// Fails if a program is already registered for this step, or the kernel refuses it.
    pub(crate) fn call(&self, step: Step, program: &ProgramMut<'_>) -> Result<StepGuard, AttachError> {
        let mut state = self.state.borrow_mut();
        if state.steps.iter().any(|other| std::mem::discriminant(other) == std::mem::discriminant(&step)) {
            return Err(AttachError::Failed(anyhow!("attach this source once beside others")));
        }
        add(state.map_of(step), step.position(), program)?;
        if let Step::RunnableSwitch { over_ns } = step {
            state.explain_waits_over(over_ns);
        }
        state.steps.insert(step);
        state.count_vector_steps();
        Ok(StepGuard { state: Rc::downgrade(&self.state), step })
    }
}

impl AccountState {
    fn map_of(&self, step: Step) -> &libbpf_rs::MapMut<'static> {
        match step {
            Step::SqpollWaking => &self.skeleton.maps.steps_of_waking,
            Step::TicksVectorEntry | Step::TicksVectorExit => &self.skeleton.maps.steps_of_vectors,
            _ => &self.skeleton.maps.steps_of_switch,
        }
    }

    fn count_vector_steps(&mut self) {
        let of_vectors = |step: &&Step| matches!(step, Step::TicksVectorEntry | Step::TicksVectorExit);
        let count = self.steps.iter().filter(of_vectors).count() as u32;
        if let Some(data) = self.skeleton.maps.bss_data.as_deref_mut() {
            data.has_vector_steps = count;
        }
    }

    fn explain_waits_over(&mut self, over_ns: u64) {
        if let Some(data) = self.skeleton.maps.bss_data.as_deref_mut() {
            data.explain_waits_over_ns = over_ns;
        }
    }
}

impl Drop for StepGuard {
    fn drop(&mut self) {
        // If the account is gone, so are its program arrays.
        let Some(state) = self.state.upgrade() else { return };
        let mut state = state.borrow_mut();
        // A detached account calls no programs, so that none needs to be deleted: a deletion would wait for a grace period.
        if !state.steps.remove(&self.step) {
            return;
        }
        if let Step::RunnableSwitch { .. } = self.step {
            state.explain_waits_over(0);
        }
        state.count_vector_steps();
        // Deletion fails only if the entry is gone already.
        let _ = state.map_of(self.step).delete(&self.step.position().to_ne_bytes());
    }
}

/// Registers the account's own program, which sources' programs tail-call when they are done.
pub(super) fn register_account(skeleton: &OccupancySkel<'_>) -> Result<(), AttachError> {
    let program = &skeleton.progs.on_sched_switch_after_step;
    Ok(add(&skeleton.maps.steps_of_switch, switch_step::STEP_ACCOUNT.0, program)?)
}

/// Moves a program to a program array, which holds it.
fn add(array: &libbpf_rs::MapMut<'_>, position: u32, program: &ProgramMut<'_>) -> libbpf_rs::Result<()> {
    let descriptor = program.as_fd().as_raw_fd().to_ne_bytes();
    array.update(&position.to_ne_bytes(), &descriptor, MapFlags::ANY)?;
    attach::close(program);
    Ok(())
}

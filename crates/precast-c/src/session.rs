//! Sessions: states that are kept from call to call, for one caller.
#![allow(
    unsafe_code,
    reason = "functions with C names, and memory of the caller"
)]

use std::{
    ffi::{c_char, c_void},
    mem::MaybeUninit,
    ptr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicPtr, Ordering::Relaxed},
    },
};

use precast_runtime::{Model as Loaded, RuntimeError, Session as Open, Value, dlpack::DLTensor};
use self_cell::self_cell;

use crate::{
    error::{Error, Failure, guarded, made, quiet},
    memory::{array, object, path, text},
    model::Model,
    outputs::Outputs,
    streams::OwnStream,
    tensors,
};

self_cell!(
    /// A session and the model that it borrows.
    struct Held {
        owner: Arc<Loaded>,
        #[not_covariant]
        dependent: Open,
    }
);

/// The states of a model for one caller.
pub struct Session {
    held: Mutex<Held>,
    /// A `cudaStream_t` of the caller; null is the default stream.
    stream: AtomicPtr<c_void>,
}

// The header lets any thread use and free the objects.
const _: () = {
    const fn moves<T: Send>() {}
    const fn is_shared<T: Send + Sync>() {}
    moves::<precast_runtime::Outputs>();
    is_shared::<Session>();
    is_shared::<Loaded>();
    is_shared::<precast_runtime::Runtime>();
    is_shared::<precast_runtime::Tensor>();
};

impl Session {
    fn new(held: Held, stream: *mut c_void) -> Self {
        Self {
            held: Mutex::new(held),
            stream: AtomicPtr::new(stream),
        }
    }

    fn open(model: &Arc<Loaded>) -> Result<Self, Failure> {
        let held = Held::try_new(model.clone(), |model| model.session())?;
        Ok(Self::new(held, ptr::null_mut()))
    }

    fn fork(&self) -> Result<Self, Failure> {
        let stream = self.stream()?;
        let _entered = stream.enter()?;
        let fork = self.lock().with_dependent(|model, session| {
            Held::try_new(model.clone(), |model| session.fork_on(model))
        })?;
        Ok(Self::new(fork, self.stream.load(Relaxed)))
    }

    /// Uses the session on its stream, after the calls of other threads in it.
    fn with<T>(
        &self,
        body: impl FnOnce(&mut Open<'_>) -> Result<T, RuntimeError>,
    ) -> Result<T, Failure> {
        let stream = self.stream()?;
        let _entered = stream.enter()?;
        Ok(self.lock().with_dependent_mut(|_, session| body(session))?)
    }

    /// Makes a call in the session.
    fn call(
        &self,
        body: impl FnOnce(&mut Open<'_>) -> Result<precast_runtime::Outputs, RuntimeError>,
    ) -> Result<Outputs, Failure> {
        Outputs::on(self.stream()?, || {
            self.lock().with_dependent_mut(|_, session| body(session))
        })
    }

    fn stream(&self) -> Result<OwnStream, Failure> {
        let device = self.lock().with_dependent(|_, session| session.device());
        // SAFETY: null, or a stream that the caller keeps as precast_session_set_stream asks.
        unsafe { OwnStream::new(self.stream.load(Relaxed), device) }
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        // After a panic the runtime itself knows whether the states can be used.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Opens a session, whose states have their first values.
///
/// A model has a limit of open sessions: see the field sessions of precast_options. A session belongs to one caller;
/// calls of several threads in one session run one after the other.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn precast_session_open(
    model: *const Model,
    out: Option<&mut MaybeUninit<Option<Box<Session>>>>,
) -> Option<Box<Error>> {
    made(out, || {
        // SAFETY: an object of the caller.
        Session::open(&unsafe { object("model", model) }?.model)
    })
}

/// Runs a module on the states of a session, as precast_model_run does.
///
/// A call that is refused does not change the states. After a call that failed while it ran, every later call fails
/// until precast_session_reset or precast_session_load.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn precast_session_run(
    session: *mut Session,
    module: *const c_char,
    inputs: *const *const DLTensor,
    names: *const *const c_char,
    count: usize,
    out: Option<&mut MaybeUninit<Option<Box<Outputs>>>>,
) -> Option<Box<Error>> {
    made(out, || {
        // SAFETY: an object, a text and tensors of the caller, which live until the function returns.
        let (session, module, inputs) = unsafe {
            let session = object("session", session)?;
            let module = text("module", module)?;
            (session, module, tensors::inputs(inputs, names, count)?)
        };
        session.call(|session| match inputs.names {
            None => session.run(module, &inputs.tensors),
            Some(names) => {
                let named: Vec<_> = names.into_iter().zip(&inputs.tensors).collect();
                session.run_named(module, &named)
            }
        })
    })
}

/// Runs the module `prefill` on the tokens of a prompt, and returns the outputs for the last tokens.
///
/// The tokens go through the buckets that they fill, the largest first, and the remaining ones through the module
/// `decode` one by one. `more` are the other inputs of both modules, in their order; they are copied. Positions are
/// counted.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn precast_session_prefill(
    session: *mut Session,
    tokens: *const i64,
    token_count: usize,
    more: *const *const DLTensor,
    more_count: usize,
    out: Option<&mut MaybeUninit<Option<Box<Outputs>>>>,
) -> Option<Box<Error>> {
    made(out, || {
        // SAFETY: an object, tokens and tensors of the caller, which live until the function returns.
        let (session, tokens, more) = unsafe {
            let session = object("session", session)?;
            let tokens = array("tokens", tokens, token_count)?;
            (session, tokens, values(more, more_count)?)
        };
        session.call(|session| session.prefill(tokens, &more))
    })
}

/// Runs the module `decode` on the next token, as precast_session_prefill does.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn precast_session_decode(
    session: *mut Session,
    token: i64,
    more: *const *const DLTensor,
    more_count: usize,
    out: Option<&mut MaybeUninit<Option<Box<Outputs>>>>,
) -> Option<Box<Error>> {
    made(out, || {
        // SAFETY: an object and tensors of the caller, which live until the function returns.
        let (session, more) = unsafe { (object("session", session)?, values(more, more_count)?) };
        session.call(|session| session.decode(token, &more))
    })
}

/// Copies tensors of the caller.
///
/// # Safety
/// `more` is null or has `count` pointers, each null or to a tensor, whose memory is not written or freed meanwhile.
unsafe fn values(more: *const *const DLTensor, count: usize) -> Result<Vec<Value>, Failure> {
    // SAFETY: as this function requires.
    let inputs = unsafe { tensors::inputs(more, std::ptr::null(), count) }?;
    let values = inputs.tensors.iter().map(Value::try_from);
    Ok(values.collect::<Result<_, _>>()?)
}

/// Returns the number of tokens that precast_session_prefill and precast_session_decode gave the session; 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn precast_session_position(session: *const Session) -> usize {
    quiet(0, || {
        // SAFETY: an object of the caller.
        let session = unsafe { object("session", session) };
        let position = |session: &Session| session.lock().with_dependent(|_, open| open.position());
        session.map_or(0, position)
    })
}

/// Returns to an earlier position: the tokens after it are dropped.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn precast_session_seek(
    session: *mut Session,
    position: usize,
) -> Option<Box<Error>> {
    guarded(|| {
        // SAFETY: an object of the caller.
        let session = unsafe { object("session", session) }?;
        session.with(|session| session.seek(position))
    })
}

/// Gives every state its first value again, also after a call that failed.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn precast_session_reset(session: *mut Session) -> Option<Box<Error>> {
    guarded(|| {
        // SAFETY: an object of the caller.
        unsafe { object("session", session) }?.with(|session| {
            session.reset();
            Ok(())
        })
    })
}

/// Opens another session with copies of the states, as for several answers to one prompt.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn precast_session_fork(
    session: *mut Session,
    out: Option<&mut MaybeUninit<Option<Box<Session>>>>,
) -> Option<Box<Error>> {
    made(out, || {
        // SAFETY: an object of the caller.
        unsafe { object("session", session) }?.fork()
    })
}

/// Writes the states that calls have used, and the position, to a safetensors file, whole or not at all.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn precast_session_save(
    session: *mut Session,
    file: *const c_char,
) -> Option<Box<Error>> {
    guarded(|| {
        // SAFETY: an object and a text of the caller.
        let (session, file) = unsafe { (object("session", session)?, path("file", file)?) };
        session.with(|session| session.save(file))
    })
}

/// Reads states from a file of precast_session_save; other states get their first values. A file of another model or of
/// other weights, or one with a changed bit, is refused and changes nothing.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn precast_session_load(
    session: *mut Session,
    file: *const c_char,
) -> Option<Box<Error>> {
    guarded(|| {
        // SAFETY: an object and a text of the caller.
        let (session, file) = unsafe { (object("session", session)?, path("file", file)?) };
        session.with(|session| session.load(file))
    })
}

/// Makes later calls of a session work on a CUDA stream: a `cudaStream_t` of the caller, or NULL for the default stream.
///
/// A call waits for earlier calls of the session on other streams. The caller destroys no stream before the session and
/// its outputs are freed. On the CPU, only NULL is accepted. A fork begins with the stream of its session.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn precast_session_set_stream(
    session: *mut Session,
    stream: *mut c_void,
) -> Option<Box<Error>> {
    guarded(|| {
        // SAFETY: an object of the caller.
        let session = unsafe { object("session", session) }?;
        let device = session.lock().with_dependent(|_, open| open.device());
        // SAFETY: the caller's stream.
        unsafe { OwnStream::new(stream, device) }?;
        session.stream.store(stream, Relaxed);
        Ok(())
    })
}

/// Frees a session. NULL is ignored.
#[unsafe(no_mangle)]
pub extern "C" fn precast_session_free(session: Option<Box<Session>>) {
    quiet((), || drop(session));
}

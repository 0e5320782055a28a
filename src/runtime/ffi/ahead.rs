//! CUDA contexts that are made while libraries load.
//!
//! A process needs libtorch and a context before its first call on a device. Each takes about as long as the other, and
//! neither needs the other, but both need the dynamic loader, which has one lock: held while a library's initialisers
//! run, and wanted by `cuInit` and by the making of a context at their beginnings. So one that begins while libtorch loads waits
//! until that is done, and one that began a little earlier runs beside it. [`begin`] therefore returns when `cuInit` is
//! done and a context has had its beginning; what is loaded after it delays nothing.
//!
//! Loading libtorch at the start of a process has the same initialisers, but not the lock: [`before_main`] begins before
//! the first of them, and by `main` most of a context is there, and of the CUDA half of libtorch what needs nothing of
//! the rest. The latter is loaded beside `cuInit`, which takes 100 ms on an H200, about as long as the context after it.
//! It is told by the environment, which nothing else in the library reads: it runs before anybody could tell it anything.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    ptr,
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use libloading::os::unix::{Library as Loaded, RTLD_LOCAL, RTLD_NOW};

use super::apart;
use crate::prelude::CUDA_AHEAD;

/// How long the driver's initialisation, and a context, take to their last need of the loader, with a margin.
const BEGINNING: Duration = Duration::from_millis(5);

/// The thread that makes contexts; one in the life of a process.
static THREAD: Mutex<Thread> = Mutex::new(Thread::None);

enum Thread {
    None,
    Working(libc::pthread_t),
    Done,
}

/// Whether the driver is initialised; nothing while that is under way.
static INITIALISED: (Mutex<Option<bool>>, Condvar) = (Mutex::new(None), Condvar::new());

/// Whether somebody waits for the threads to end.
static ENDING: AtomicBool = AtomicBool::new(false);

unsafe extern "C" {
    /// libc's own, which `getenv` reads.
    static environ: *const *const c_char;
}

/// What the thread is to do.
struct Work {
    devices: Vec<usize>,
    /// Whether libc may not be initialised yet.
    early: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Begins to make the contexts of these devices, unless the process has begun with some already.
///
/// Says nothing of a device that is not there, or of a machine without CUDA: whoever asks libtorch for it is told.
pub fn begin(devices: &[usize]) {
    if !start(devices.to_vec(), false) {
        return;
    }
    let (initialised, changed) = &INITIALISED;
    let initialised = changed.wait_while(lock(initialised), |initialised| initialised.is_none());
    if *initialised.unwrap_or_else(PoisonError::into_inner) == Some(true) {
        thread::sleep(BEGINNING);
    }
}

/// Waits until what was begun is done, so that no exit of the process meets it.
pub fn finish() {
    let mut thread = lock(&THREAD);
    ENDING.store(true, Ordering::Relaxed);
    if let Thread::Working(working) = *thread {
        *thread = Thread::Done;
        // SAFETY: it was made joinable and is joined here alone, as the state says from now on.
        unsafe { libc::pthread_join(working, ptr::null_mut()) };
    }
}

/// Begins a context if `PRECAST_CUDA_AHEAD` asks for one. To be called from an executable's `.preinit_array`.
///
/// # Safety
///
/// `environment` is what the loader gives such a function: NUL-terminated texts up to a null pointer.
pub unsafe extern "C" fn before_main(
    _: c_int,
    _: *const *const c_char,
    environment: *const *const c_char,
) {
    let mut at = environment;
    // SAFETY: so says the caller.
    while let Some(text) = unsafe { (*at).as_ref() } {
        // SAFETY: likewise.
        let text = unsafe { CStr::from_ptr(text) }.to_bytes();
        let value =
            (text.strip_prefix(CUDA_AHEAD.as_bytes())).and_then(|rest| rest.strip_prefix(b"="));
        if let Some(Ok(device)) = value.map(|value| str::from_utf8(value).unwrap_or("").parse()) {
            start(vec![device], true);
        }
        // SAFETY: not the null pointer, so there is another.
        at = unsafe { at.add(1) };
    }
}

/// Returns whether this call began.
fn start(devices: Vec<usize>, early: bool) -> bool {
    let mut thread = lock(&THREAD);
    if devices.is_empty() || !matches!(*thread, Thread::None) {
        return false;
    }
    let asked = Box::into_raw(Box::new(Work { devices, early }));
    let begun = spawn(work, asked.cast());
    match begun {
        Some(made) => *thread = Thread::Working(made),
        // SAFETY: nobody took it.
        None => drop(unsafe { Box::from_raw(asked) }),
    }
    begun.is_some()
}

/// Begins a thread; not one of std's, which promises nothing before `main`.
fn spawn(
    work: extern "C" fn(*mut c_void) -> *mut c_void,
    with: *mut c_void,
) -> Option<libc::pthread_t> {
    let mut made: libc::pthread_t = 0;
    // SAFETY: `made` is a valid out pointer, and `work` knows what it is given.
    let failed = unsafe { libc::pthread_create(&mut made, ptr::null(), work, with) };
    (failed == 0).then_some(made)
}

extern "C" fn work(asked: *mut c_void) -> *mut c_void {
    // SAFETY: `start` made it of this type and left it to this function.
    let Work { devices, early } = *unsafe { Box::from_raw(asked.cast::<Work>()) };
    let ready = !early || libc_is_there();
    let driver = ready.then(Driver::load).flatten();
    // Whoever begins later is about to load all of it.
    let beside = (driver.is_some() && early)
        .then(|| spawn(libraries, ptr::null_mut()))
        .flatten();
    let driver = driver.filter(Driver::initialise);
    let (initialised, changed) = &INITIALISED;
    *lock(initialised) = Some(driver.is_some());
    changed.notify_all();
    if let Some(driver) = driver {
        devices.iter().for_each(|&device| driver.context(device));
    }
    if let Some(beside) = beside {
        // SAFETY: it was made joinable and is joined here alone.
        unsafe { libc::pthread_join(beside, ptr::null_mut()) };
    }
    ptr::null_mut()
}

extern "C" fn libraries(_: *mut c_void) -> *mut c_void {
    // The driver's initialisation, and the context after it, want the loader's lock first.
    thread::sleep(BEGINNING);
    let mut initialised = None;
    apart::load(|| {
        if initialised.is_none() {
            initialised = *lock(&INITIALISED.0);
            if initialised == Some(true) {
                thread::sleep(BEGINNING);
            }
        }
        initialised == Some(false) || ENDING.load(Ordering::Relaxed)
    });
    ptr::null_mut()
}

/// Waits until libc is initialised, which the main thread does next; returns whether it is.
///
/// Loading a library before that would initialise libc from here, without the environment, for the whole process. It takes
/// microseconds, or longer where the main thread has to wait for a core; a second is more than that.
fn libc_is_there() -> bool {
    for _ in 0..20_000 {
        // SAFETY: a pointer that libc writes once, as its initialisation; read anew each time, and not followed.
        if !unsafe { ptr::read_volatile(&raw const environ) }.is_null() {
            return true;
        }
        thread::sleep(Duration::from_micros(50));
    }
    false
}

/// The driver's own library, for as long as the process lives.
struct Driver {
    init: unsafe extern "C" fn(u32) -> c_int,
    device: unsafe extern "C" fn(*mut c_int, c_int) -> c_int,
    retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int,
}

impl Driver {
    /// Loads it; none where there is no driver.
    fn load() -> Option<Self> {
        // SAFETY: it is the driver, whose initialisers libtorch's CUDA half would run as well.
        let library = unsafe { Loaded::open(Some("libcuda.so.1"), RTLD_NOW | RTLD_LOCAL) }.ok()?;
        // SAFETY: the signatures of cuda.h, where a `CUdevice` and a `CUresult` are an `int`.
        let (init, device, retain) = unsafe {
            (
                *library.get(b"cuInit\0").ok()?,
                *library.get(b"cuDeviceGet\0").ok()?,
                *library.get(b"cuDevicePrimaryCtxRetain\0").ok()?,
            )
        };
        std::mem::forget(library);
        Some(Self {
            init,
            device,
            retain,
        })
    }

    /// Initialises it; returns whether there is a device.
    fn initialise(&self) -> bool {
        // SAFETY: it may be called from any thread, and again.
        unsafe { (self.init)(0) == 0 }
    }

    /// Makes the context that libtorch will use, and keeps it. No thread's current context changes.
    fn context(&self, ordinal: usize) {
        let (mut device, mut context) = (0, ptr::null_mut());
        let Ok(ordinal) = c_int::try_from(ordinal) else {
            return;
        };
        // SAFETY: valid out pointers, and the second gets a device only if the first found it.
        unsafe {
            if (self.device)(&mut device, ordinal) == 0 {
                (self.retain)(&mut context, device);
            }
        }
    }
}

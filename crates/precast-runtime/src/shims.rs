//! The shim that a load opens, and the versions of torch that a release may run under.
//!
//! A release names a shim for each torch under which its gates passed: the torch that it was built with, and newer
//! ones, for which `precast verify --host` ran them. Under another torch, it is refused by name.

use precast_store::{
    Device, Digest, Target,
    record::{Program, Shim},
    target::Torch,
};

use super::{
    RuntimeError,
    ffi::{cuda_shim_is_open, open_cuda_shim, open_shim, shim_is_open},
    source::Source,
    trial::Trials,
};

/// Returns whether a shim is for the torch of a host, with any sources.
fn is_for(shim: &Shim, host: &Target) -> bool {
    shim.arch == host.arch && shim.torch == host.torch && shim.torch_git == host.torch_git
}

/// Returns the host for comparisons with targets: where the gates passed under this host's torch, it counts as the
/// torch that the programs were built with.
pub(super) fn counting(host: &Target, shims: &[Shim], programs: &[&Program]) -> Target {
    let mut host = host.clone();
    if let Some(built) = programs.first().map(|program| &program.target)
        && Torch::is_older(&built.torch, &host.torch)
        && shims.iter().any(|shim| is_for(shim, &host))
    {
        host.torch.clone_from(&built.torch);
        host.torch_git.clone_from(&built.torch_git);
        host.cuda.clone_from(&built.cuda);
    }
    host
}

/// Returns whether a program of a release with these shims runs on a host.
pub(super) fn may_run(host: &Target, shims: &[Shim], program: &Program) -> bool {
    let own = |shim: &Shim| is_for(shim, host) && shim.source == precast_shim::source();
    shims.iter().any(own)
        && (program.target)
            .mismatches(&counting(host, shims, &[program]))
            .is_empty()
}

/// Opens the shim for this host's torch, with its CUDA half on a CUDA device. The first load of each is tried.
pub(super) fn open(
    source: &dyn Source,
    shims: &[Shim],
    device: Device,
    host: &Target,
    trials: Option<&Trials>,
) -> Result<(), RuntimeError> {
    let mut own = shims.iter().filter(|shim| is_for(shim, host));
    let shim = own
        .clone()
        .find(|shim| shim.source == precast_shim::source());
    let Some(shim) = shim else {
        return Err(RuntimeError::NoShim {
            torch: host.torch.clone(),
            known: shims.iter().map(|shim| shim.torch.clone()).collect(),
            outdated: own.next().is_some(),
        });
    };
    let file = |object| {
        source
            .memfd(object)
            .map_err(super::error::in_store(format!("shim `{}`", object.short())))
    };
    let tried = |object: &Digest| trials.map_or(Ok(()), |t| t.first(source, &[*object], device));
    if !shim_is_open() {
        tried(&shim.object)?;
        open_shim(&shim.object, || file(&shim.object))?;
        trials.inspect(|trials| trials.loaded(shim.object));
    }
    // Without it nothing runs as a CUDA graph.
    if let (Device::Cuda(_), Some(cuda), false) = (device, &shim.cuda, cuda_shim_is_open()) {
        tried(cuda)?;
        open_cuda_shim(cuda, || file(cuda))?;
        trials.inspect(|trials| trials.loaded(*cuda));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use precast_store::target::DeviceKind;

    use super::*;

    fn shim(torch: &str) -> Shim {
        Shim {
            arch: std::env::consts::ARCH.into(),
            torch: torch.into(),
            torch_git: format!("commit of {torch}"),
            source: precast_shim::source(),
            object: Digest::of(b"shim"),
            cuda: None,
        }
    }

    fn host(torch: &str) -> Target {
        let torch = Torch {
            version: torch.into(),
            git: format!("commit of {torch}"),
            cuda: Some("13.0".into()),
            cxx11_abi: true,
        };
        Target::on_host(DeviceKind::Cpu, "native", &torch, &[])
    }

    #[test]
    fn a_newer_torch_counts_as_the_one_it_was_built_with_once_the_gates_passed() {
        let (_dir, _store, _, mut program) = precast_store::testing::filled();
        program.target = host("2.13.0");
        let differs = |torch: &str, shims: &[&str]| {
            let shims: Vec<Shim> = shims.iter().map(|torch| shim(torch)).collect();
            let counted = counting(&host(torch), &shims, &[&program]);
            !program.target.mismatches(&counted).is_empty()
        };
        for (torch, shims, refused) in [
            ("2.13.0", &["2.13.0"][..], false),
            ("2.13.0", &[], false),
            ("2.15.0", &["2.13.0"], true),
            ("2.15.0", &["2.13.0", "2.15.0"], false),
            ("2.15.0", &["2.13.0", "2.14.1"], true),
            ("2.13.1", &["2.13.0", "2.13.1"], false),
            // An older torch is refused, also with its shim in the record.
            ("2.11.0", &["2.13.0", "2.11.0"], true),
            ("2.12.1", &["2.13.0", "2.12.1"], true),
        ] {
            assert_eq!(differs(torch, shims), refused, "{torch} {shims:?}");
        }
        // The gates ran with another build of that version.
        let mut other = shim("2.15.0");
        other.torch_git = "another commit".into();
        let counted = counting(&host("2.15.0"), &[other], &[&program]);
        assert!(!program.target.mismatches(&counted).is_empty());
        let mut other = shim("2.15.0");
        other.arch = "riscv64".into();
        let counted = counting(&host("2.15.0"), &[other], &[&program]);
        assert_eq!(counted, host("2.15.0"));
    }

    #[test]
    fn any_other_field_of_a_shim_or_a_host_is_refused() {
        let (_dir, _store, _, mut program) = precast_store::testing::filled();
        program.target = host("2.11.0");
        // Built with 2.11.0, and gated under 2.13.0.
        let shims = [shim("2.11.0"), shim("2.13.0")];
        for torch in ["2.11.0", "2.13.0"] {
            assert!(may_run(&host(torch), &shims, &program));
        }
        let changes: [fn(&mut Shim); 5] = [
            |shim| shim.arch = "riscv64".into(),
            |shim| shim.torch = "2.13.1".into(),
            |shim| shim.torch.push_str("+cpu"),
            |shim| shim.torch_git.push('0'),
            |shim| shim.source = Digest::of(b"other sources"),
        ];
        for (i, change) in changes.iter().enumerate() {
            let mut changed = shims.clone();
            change(&mut changed[1]);
            assert!(!may_run(&host("2.13.0"), &changed, &program), "change {i}");
            assert!(may_run(&host("2.11.0"), &changed, &program), "change {i}");
        }
        let changes: [fn(&mut Target); 8] = [
            |host| host.os = "other".into(),
            |host| host.arch = "riscv64".into(),
            |host| host.features.clear(),
            |host| host.device = DeviceKind::Cuda,
            |host| host.torch = "2.12.1".into(),
            |host| host.torch.push_str("+cpu"),
            |host| host.torch_git.push('0'),
            |host| host.cxx11_abi = false,
        ];
        for (i, change) in changes.iter().enumerate() {
            for torch in ["2.11.0", "2.13.0"] {
                let mut changed = host(torch);
                change(&mut changed);
                assert!(!may_run(&changed, &shims, &program), "{torch}, change {i}");
            }
        }
        // Of a program for a GPU the chip too; its CUDA is torch's.
        program.target.device = DeviceKind::Cuda;
        program.target.sm = Some("90".into());
        let mut gpu = Target {
            sm: Some("90".into()),
            device: program.target.device,
            ..host("2.13.0")
        };
        gpu.cuda = Some("13.2".into());
        assert!(may_run(&gpu, &shims, &program));
        gpu.sm = Some("80".into());
        assert!(!may_run(&gpu, &shims, &program));
    }

    #[test]
    fn a_release_without_a_fitting_shim_is_refused_by_name() {
        let (_dir, store) = precast_store::testing::store();
        let refused = |shims: &[Shim]| {
            let error = open(&store, shims, Device::Cpu, &host("2.13.0"), None).unwrap_err();
            (error.to_string(), error.hint())
        };
        let (text, hint) = refused(&[shim("2.11.0"), shim("2.12.1")]);
        insta::assert_snapshot!(text, @"the release has no shim for torch 2.13.0: it has those for 2.11.0, 2.12.1");
        assert!(hint.contains("`precast verify --host MODEL`"), "{hint}");
        let mut old = shim("2.13.0");
        old.source = Digest::of(b"earlier sources");
        let (text, hint) = refused(&[old]);
        insta::assert_snapshot!(text, @"the release's shim for torch 2.13.0 is of another version of Precast");
        assert!(hint.contains("compiles nothing else"), "{hint}");
        insta::assert_snapshot!(refused(&[]).0, @"the release has no shim: an earlier version of Precast built it");
    }
}

//! Weights in the order that the CPU's kernels read them: made once for each weight set, and never in a call.

use std::{fs, path::PathBuf, process::Command};

use precast::{
    Device, Store,
    runtime::{Tensor, WeightSet, command::tensors},
    store::Options,
};

use crate::{
    ATOL, RTOL,
    lab::{Lab, checkout, python, runtime, shared, well},
};

const CONVNET: &str = "tests/numerics/convnet/precast.toml";

/// Writes another model's weights, an input, and that model's answer to it.
const OTHER: &str = "
import sys, torch
sys.path.insert(0, 'tests/numerics/convnet')
from model import load
from safetensors.torch import save_file
net = load(seed=1)
save_file({name: t.contiguous() for name, t in net.state_dict().items()}, sys.argv[1])
x = torch.randn(4, 3, 16, 16)
with torch.inference_mode():
    logits, row = net(x)
save_file({'x': x, 'logits': logits, 'row': row}, sys.argv[2])
";

fn floats(tensor: &Tensor) -> Vec<f32> {
    tensor.to_vec().unwrap()
}

/// Returns whether two float32 tensors have one shape and every element is within `ATOL + RTOL * |want|`.
fn close(got: &Tensor, want: &Tensor) -> bool {
    let mut pairs = std::iter::zip(floats(got), floats(want));
    let near = |(got, want): (f32, f32)| {
        let (got, want) = (f64::from(got), f64::from(want));
        (got - want).abs() <= ATOL + RTOL * want.abs()
    };
    got.shape() == want.shape() && pairs.all(near)
}

#[test]
#[ignore = "long: `make test-long`"]
fn filters_and_matrices_are_laid_out_once_for_each_weight_set() {
    let root = tempfile::tempdir().unwrap();
    let lab = shared();
    let built = lab.json(&["build", "-f", CONVNET]);
    assert_eq!(built["compiled"], 3, "{built}");
    // Weights that the passes can't transform are compiled all the same.
    lab.agrees(CONVNET, "convnet", "odd", "batch=2", RTOL, ATOL);
    for (batch, bucket) in [(1, 1), (4, 4), (3, 4)] {
        let [case, bucket] = [batch, bucket].map(|size| format!("batch={size}"));
        let served = lab.agrees(CONVNET, "convnet", "classify", &case, RTOL, ATOL);
        assert_eq!(served.0, bucket);
    }

    are_kept(lab);

    // A call runs oneDNN on prepacked weights, without batch norms.
    let store = Store::open(&lab.store).unwrap();
    let release = store.releases().get("convnet", None).unwrap().unwrap();
    let packed = |step: &precast::record::Step| {
        let artifact = store.records().artifact(&step.artifact).unwrap().unwrap();
        let made = artifact.prepared.iter();
        made.filter(|made| made.stride.is_none()).count()
    };
    let (mut steps, mut odd) = (Vec::new(), Vec::new());
    for id in &release.programs {
        let program = store.records().program(id).unwrap().unwrap();
        match &*program.module {
            "classify" => {
                let one = program.sizes["batch"] == 1;
                steps.extend(program.steps.into_iter().map(|step| (one, step)));
            }
            _ => odd.extend(program.steps.iter().map(packed)),
        }
    }
    assert_eq!(odd, [2], "filters of float32 are packed, of float64 not");
    assert_eq!(steps.len(), 2);
    for (one, step) in &steps {
        let artifact = store.records().artifact(&step.artifact).unwrap().unwrap();
        // 5 filters, and the larger matrix: a product of one row reads that as it is.
        let expected = if *one { 5 } else { 6 };
        assert_eq!(packed(step), expected, "{:?}", artifact.prepared);
        let code = store.objects().read(&artifact.object).unwrap();
        let calls = |name: &str| memchr::memmem::find(&code, name.as_bytes()).is_some();
        assert!(calls("aoti_torch_cpu_mkldnn__convolution_pointwise"));
        assert_eq!(calls("aoti_torch_cpu__linear_pointwise"), !one);
        for gone in ["aoti_torch_cpu_convolution", "batch_norm"] {
            assert!(!calls(gone), "`{gone}` is called");
        }
    }

    let [weights, case] = ["other", "case"].map(|name| root.path().join(name));
    let mut write = Command::new(python());
    let write = write.args(["-c", OTHER]).args([&weights, &case]);
    well(write.current_dir(checkout()));
    let runtime = runtime(&store).eager_fallback(false);
    let model = runtime.load("convnet").unwrap();
    let case = tensors::read(fs::File::open(case).unwrap()).unwrap();
    let (x, logits, scaled) = (&case["x"], &case["logits"], &case["row"]);
    let run = |x: &Tensor| model.run("classify", &[x]).unwrap().into_vec();
    let mut before = run(x);
    // A result is the caller's, also a result computed from weights alone.
    let row = before[1].contiguous().unwrap();
    let seven = Tensor::from_slice(&[7.0_f32], &[1]).unwrap();
    before[1].copy_from(&seven).unwrap();
    before = run(x);
    assert_eq!(before[1].shape(), row.shape());
    assert!(floats(&before[1]) == floats(&row), "it was written into");
    let (digest, _) = store.objects().put_file(&weights).unwrap();
    let other = runtime.weights(Some(digest)).unwrap();
    model.swap(&other).unwrap();
    let after = run(x);
    assert!(close(&after[0], logits), "an answer after a swap");
    assert!(close(&after[1], scaled));
    assert!(!close(&before[0], logits));
    let first = x.narrow(0, 0, 1).unwrap();
    model.run("classify", &[first]).unwrap();

    // Two buckets made little more than one would.
    let made = other.prepared_bytes();
    let own = other.bytes();
    println!("{own} bytes of weights, {made} of forms of them");
    assert!(made > 0 && made < own * 3 / 2);

    // Without freezing nothing is prepacked, and another artifact is compiled.
    let plain = [
        "--set",
        "options.freezing=false",
        "--only",
        "classify batch=1",
    ];
    let built = lab.json(&[&["build", "-j1", "-f", CONVNET], &plain[..]].concat());
    assert_eq!(built["compiled"], 1, "{built}");
    let id = serde_json::from_value(built["programs"][0]["id"].clone()).unwrap();
    let program = store.records().program(&id).unwrap().unwrap();
    let artifact = store.records().artifact(&program.steps[0].artifact);
    let artifact = artifact.unwrap().unwrap();
    assert_eq!(artifact.prepared, []);
    let code = store.objects().read(&artifact.object).unwrap();
    assert!(memchr::memmem::find(&code, b"aoti_torch_cpu_convolution").is_some());

    // So that artifact follows the caller's tensors, and the others refuse them.
    let own = store.objects().read(&release.weights.unwrap()).unwrap();
    let own = tensors::read(&own[..]).unwrap();
    let named = own.iter().map(|(name, held)| (name.clone(), held.share()));
    let live = WeightSet::of(named.collect(), Device::Cpu).unwrap();
    let refused = model.swap(&live).unwrap_err();
    assert_eq!(refused.name(), "ComputedFromWeights", "{refused}");
    let (weights_of, aliases) = (release.weights, release.aliases);
    let plain = runtime.load_programs(
        "convnet",
        vec![program],
        &release.shims,
        weights_of,
        aliases,
    );
    let plain = plain.unwrap();
    plain.swap(&live).unwrap();
    let first = x.narrow(0, 0, 1).unwrap();
    let run = || plain.run("classify", &[&first]).unwrap().into_vec();
    let start = |tensor: &Tensor| tensor.narrow(0, 0, 1).unwrap();
    assert!(close(&run()[0], &start(&before[0])));
    for (name, value) in tensors::read(fs::File::open(&weights).unwrap()).unwrap() {
        own[&name].share().copy_from(&value).unwrap();
    }
    let after = run();
    assert!(close(&after[0], &start(logits)), "after a change in place");
    assert!(close(&after[1], scaled));
}

/// Checks that prepacked weights are kept for later processes, and computed again where a file is damaged or missing.
fn are_kept(lab: &Lab) {
    let case = [1.0_f32, -2.0, 0.5].repeat(4 * 16 * 16);
    let x = Tensor::from_slice(&case, &[4, 3, 16, 16]).unwrap();
    let answer = |prepacked: Option<u64>| {
        let options = Options {
            prepacked,
            ..Options::default()
        };
        let store = Store::open_with(&lab.store, options).unwrap();
        let model = runtime(&store).load("convnet").unwrap();
        floats(&model.run("classify", &[&x]).unwrap().into_vec()[0])
    };
    let store = Store::open(&lab.store).unwrap();
    let release = store.releases().get("convnet", None).unwrap().unwrap();
    let folder = format!("cache/prepacked/{}", release.weights.unwrap());
    let files = || -> Vec<PathBuf> {
        let files = fs::read_dir(lab.store.join(&folder)).into_iter().flatten();
        files.map(|file| file.unwrap().path()).collect()
    };
    // The gate of the build was the first such process.
    let kept = files();
    assert!(!kept.is_empty(), "the larger matrix");
    let computed = answer(Some(0));
    assert_eq!(answer(None), computed);
    // A damaged file is made again, and a missing one too.
    for file in &kept {
        let mut bytes = fs::read(file).unwrap();
        bytes[1000] ^= 1;
        fs::remove_file(file).unwrap();
        fs::write(file, bytes).unwrap();
    }
    assert_eq!(answer(None), computed);
    assert_eq!(files().len(), kept.len());
    fs::remove_dir_all(lab.store.join(&folder)).unwrap();
    assert_eq!(answer(None), computed);
    assert_eq!(answer(None), computed);
    assert_eq!(files().len(), kept.len());
    assert_eq!(store.audit().verify().unwrap().defects, []);
}

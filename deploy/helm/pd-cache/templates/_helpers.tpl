{{- define "pd-cache.fullname" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "pd-cache.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "pd-cache.labels" -}}
{{ include "pd-cache.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* A size in bytes: a number in full, which helm would write as 1.073741824e+09. */}}
{{- define "pd-cache.bytes" -}}
{{- if kindIs "string" . }}{{ . }}{{ else }}{{ int64 . }}{{ end }}
{{- end }}

{{/* Not among the values: helm merges into those, and a model of vLLM's is a name. */}}
{{- define "pd-cache.trial-engine" -}}
kind: reference
model:
  name: demo
  random: {seed: 7, hidden_size: 512, intermediate_size: 1376, layers: 6, heads: 8, kv_heads: 4}
{{- end }}

{{/*
The shared sections of a role's file: those that it reads, because a change to its file restarts its pods. Called with a dict: root, role.
Masters and proxies move no KV, and need no NIC.
*/}}
{{- define "pd-cache.shared" -}}
{{- $ := .root }}
{{- range $key := list "name" "discovery" "nodes" "master" }}
{{- if hasKey $.Values.config $key }}{{ fail (printf "config.%s: the chart writes this section; see clusterName, etcd and the roles" $key) }}{{ end }}
{{- end }}
name: {{ $.Values.clusterName }}
discovery:
  kind: etcd
  endpoints: {{ toJson $.Values.etcd.endpoints }}
master: {ha: true}
{{ $config := deepCopy $.Values.config }}
{{- if not $config.engine }}{{ $_ := set $config "engine" (fromYaml (include "pd-cache.trial-engine" .)) }}{{ end }}
{{- if not $config.engine.model }}{{ fail (printf "config.engine.model: the %s engine needs it, and config.engine has only %v" ($config.engine.kind | default "reference") (keys $config.engine | sortAlpha)) }}{{ end }}
{{- $sizes := list }}{{ range list "prefill" "decode" }}{{ $sizes = append $sizes (index $.Values . "args" | dig "tensor-parallel-size" 1 | int) }}{{ end }}
{{- if and (gt (len (uniq $sizes)) 1) (not (dig "cache" "shards" 0 $config)) }}{{ fail (printf "config.cache.shards: tensor-parallel sizes of %v share no chunks without it; set it to their least common multiple" $sizes) }}{{ end }}
{{- if include "pd-cache.rdma" . }}
{{- $rdma := dict "protocol" "rdma" }}{{ if $.Values.rdma.devices }}{{ $_ := set $rdma "devices" "NODE_NICS" }}{{ end }}
{{- $_ := set $config "transfer" (merge $rdma (get $config "transfer" | default dict)) }}{{ end }}
{{- if $.Values.proxy.tlsSecret }}{{ $tls := dict "cert_file" "/etc/pd-cache-tls/tls.crt" "key_file" "/etc/pd-cache-tls/tls.key" }}
{{- $_ := set $config "proxy" (merge (dict "tls" $tls) (get $config "proxy" | default dict)) }}{{ end }}
{{- $memory := list "cache" "engine" "connector" "handoff" "proxy" "tracing" }}
{{- $unread := dict "master" $memory "store" $memory "cache-server" (without $memory "cache" "engine") "prefill" (list "proxy") "decode" (list "proxy") }}
{{- range get $unread .role | default list }}{{ $_ := unset $config . }}{{ end }}
{{- toYaml $config }}
{{- end }}

{{- define "pd-cache.rdma" -}}
{{- if and .root.Values.rdma.enabled (not (has .role (list "master" "proxy"))) }}yes{{ end }}
{{- end }}

{{/*
The pod of a role. Called with a dict: root, role, values (the role's), port (of its probes), scheme, startup (seconds),
ports (name: number), mounts and volumes (lists), init (a list), image.
A pod's file is the role's, with the pod's own address and name: a node's host is what it binds and what others use.
*/}}
{{- define "pd-cache.pod" -}}
{{- $ := .root }}
{{- $v := .values }}
{{- $rdma := include "pd-cache.rdma" . }}
{{- $size := $v.segmentSize | default "" | toString }}{{ $limit := dig "resources" "limits" "memory" "" $v | toString }}
{{- if and (regexMatch "^[0-9]+GiB$" $size) (regexMatch "^[0-9]+Gi$" $limit) (ge (trimSuffix "GiB" $size | int) (trimSuffix "Gi" $limit | int)) }}
{{- fail (printf "%s: segmentSize %s and 1 GiB besides do not fit into resources.limits.memory %s" .role $size $limit) }}{{ end }}
{{- $nics := and $rdma $.Values.rdma.devices }}
metadata:
  labels:
    {{- include "pd-cache.selector" $ | nindent 4 }}
    app.kubernetes.io/component: {{ .role }}
  annotations:
    checksum/config: {{ get (include (print $.Template.BasePath "/configmap.yaml") $ | fromYaml).data (print .role ".yaml") | sha256sum }}
    {{- with $v.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ add 15 (dig "supervisor" "stop_grace_s" 10 $.Values.config | int) }}
  {{- if $.Values.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- with $.Values.imagePullSecrets }}
  imagePullSecrets: {{ toYaml . | nindent 4 }}
  {{- end }}
  {{- range $key := list "nodeSelector" "tolerations" "affinity" "priorityClassName" "runtimeClassName" }}
  {{- with index $v $key }}
  {{ $key }}: {{ if kindIs "string" . }}{{ . }}{{ else }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- end }}
  {{- end }}
  {{- if and (eq .role "master") (not $v.affinity) }}
  affinity:  # masters on different nodes, where there are several
    podAntiAffinity:
      preferredDuringSchedulingIgnoredDuringExecution:
        - weight: 100
          podAffinityTerm:
            topologyKey: kubernetes.io/hostname
            labelSelector: {matchLabels: {{ set (include "pd-cache.selector" $ | fromYaml) "app.kubernetes.io/component" .role | toJson }}}
  {{- end }}
  securityContext:
    {{- if $rdma }}
    runAsUser: 0  # only root locks memory
    {{- else }}
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    {{- end }}
    seccompProfile: {type: RuntimeDefault}
  {{- with .init }}
  initContainers: {{ toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .role }}
      image: {{ .image | default (printf "%s:%s" $.Values.image.repository ($v.imageTag | default $.Values.image.tag | default $.Chart.AppVersion)) | quote }}
      imagePullPolicy: {{ $.Values.image.pullPolicy }}
      command: [/bin/sh, -ec]
      args:
        - |
          {{- with $nics }}
          case "$NODE_NAME" in
          {{- range . }}
          {{ .nodes }}) nics='{{ join ", " .devices }}' ;;
          {{- end }}
          *) echo "rdma.devices has no entry for the node $NODE_NAME" >&2; exit 1 ;;
          esac
          {{- end }}
          sed -e "s/POD_IP/$POD_IP/g" -e "s/POD_NAME/$POD_NAME/g"{{ if $nics }} -e "s/NODE_NICS/[$nics]/"{{ end }} /etc/pd-cache/{{ .role }}.yaml >/run/pd-cache-file/cluster.yaml
          exec pd-cache launch {{ .role }} -c /run/pd-cache-file/cluster.yaml --node "$POD_NAME"
      env:
        - name: POD_NAME
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        {{- if $nics }}
        - name: NODE_NAME
          valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
        {{- end }}
        {{- range $name, $value := $v.env }}
        - name: {{ $name }}
          value: {{ $value | quote }}
        {{- end }}
      ports:
        {{- range $name, $port := .ports }}
        - {name: {{ $name }}, containerPort: {{ $port }}, protocol: TCP}
        {{- end }}
      {{- $get := dict "path" "/health" "port" .port "scheme" (.scheme | default "HTTP") }}
      startupProbe:
        httpGet: {{ toJson $get }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ div (.startup | default 600 | int) 5 }}
      readinessProbe:
        httpGet: {{ toJson $get }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 3
      livenessProbe:
        {{- if eq .role "proxy" }}
        tcpSocket: {port: {{ .port }}}  # a proxy without nodes is not well, and a restart would not help it
        {{- else }}
        httpGet: {{ toJson $get }}
        {{- end }}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 6
      {{- $nic := dict }}{{ if $rdma }}{{ $_ := set $nic "limits" (dict $.Values.rdma.resource 1) }}{{ end }}
      {{- with merge $nic (deepCopy ($v.resources | default dict)) }}
      resources: {{ toYaml . | nindent 8 }}
      {{- end }}
      securityContext:
        allowPrivilegeEscalation: false
        capabilities:
          drop: [ALL]
          {{- if $rdma }}
          add: [IPC_LOCK]
          {{- end }}
      volumeMounts:
        - {name: config, mountPath: /etc/pd-cache, readOnly: true}
        - {name: file, mountPath: /run/pd-cache-file}
        {{- with .mounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: config
      configMap: {name: {{ include "pd-cache.fullname" $ }}}
    - name: file
      emptyDir: {}
    {{- with .volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{/* The folder of the cache server's socket on the node, which only the pods' user may enter. */}}
{{- define "pd-cache.socket-folder" -}}
name: socket-folder
image: {{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
command: [/bin/sh, -ec, "chown {{ if .Values.rdma.enabled }}0:0{{ else }}10001:10001{{ end }} {{ .Values.cacheServer.socketFolder }}; chmod 0700 {{ .Values.cacheServer.socketFolder }}"]
resources: {requests: {cpu: 10m, memory: 16Mi}, limits: {memory: 64Mi}}
securityContext:
  runAsUser: 0
  runAsNonRoot: false
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL], add: [CHOWN, FOWNER]}
volumeMounts:
  - {name: socket, mountPath: {{ .Values.cacheServer.socketFolder }}}
{{- end }}

{{- define "pd-cache.socket-volume" -}}
name: socket
hostPath: {path: {{ .Values.cacheServer.socketFolder }}, type: DirectoryOrCreate}
{{- end }}
